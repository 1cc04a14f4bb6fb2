"""Public reports of memory that stays, each built anew as a small notebook: what the person saw, and what ends it here."""

from __future__ import annotations

from dataclasses import dataclass

_ADAPTERS = """
from peft import LoraConfig, get_peft_model
config = LoraConfig(r=256, target_modules=['0'])
net, count = get_peft_model(nn.Sequential(nn.Linear(600, 600)).cuda(), config, adapter_name='task0'), 0
"""
_EVALUATE = """
scores, labels = torch.rand(1 << 17, 2, device='cuda'), torch.ones(1 << 17, 2, dtype=torch.long, device='cuda')
def evaluate(batches=3):
    for _ in range(batches): ranks.update(scores.clone(), labels.clone())
"""
_OWN_METRIC = """
class Ranks:
    def __init__(self): self.reset()
    def reset(self): self.scores, self.labels = [], []
    def update(self, scores, labels): self.scores.append(scores); self.labels.append(labels)
    def compute(self): return torch.cat(self.scores).mean()
ranks = Ranks()
"""
_STUDY = """
class Trial:
    def __init__(self, number): self.number, self.attributes = number, {}
class Study:
    def __init__(self): self.trials = []
    def optimize(self, objective, n_trials):
        for _ in range(n_trials):
            self.trials.append(Trial(len(self.trials)))
            self.trials[-1].score = objective(self.trials[-1])
def objective(trial):
    trial.attributes['net'] = nn.Linear(500, 500).cuda()
    return trial.number
study = Study()
"""
_OPTUNA = """
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
def objective(trial):
    trial.set_user_attr('net', nn.Linear(500, 500).cuda())
    return trial.number
study = optuna.create_study(direction='maximize')
"""
_LINEAR_500 = (500 * 500 + 500) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One report: cells that lead to it, after `import gc, torch` and the extension's loading, and the way out."""

    source: str  # the report's address
    saw: str  # what the person saw
    cells: tuple[str, ...]
    command: str  # what is printed, by a notice or as a finding, and ends it
    frees: int  # bytes, at the least
    leaves: str  # an expression that is true afterwards: what must not be lost
    needs: str = ""  # a library that is not among those of the tests


CASES = {
    "a cache has the model of every fold": Case(
        source="https://github.com/meta-pytorch/torchtune/issues/904",
        saw="Each fold of a cross-validation began with more memory. A helper under lru_cache had the model as its argument.",
        cells=(
            "import functools\n"
            "@functools.cache\n"
            "def decayed(net): return tuple(p for name, p in net.named_parameters() if 'bias' not in name)\n"
            "def fold(seed):\n"
            "    net = nn.Sequential(nn.Linear(200, 1000), nn.Tanh(), nn.Linear(1000, 2)).cuda()\n"
            "    torch.optim.AdamW(decayed(net), lr=0.01)\n"
            "    return seed",
            "for seed in range(5): fold(seed)",
        ),
        command="decayed.cache_clear()",
        frees=5 * (200 * 1000 + 1000 * 2) * 4,
        leaves="fold(7) == 7",
    ),
    "a hook refers to its own module": Case(
        source="https://github.com/pytorch/pytorch/issues/46386",
        saw="A module was made in a loop and bound to the same name. Its hook refers to it, so each waited for the collector.",
        cells=(
            "gc.disable()\n"
            "class Tap(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.layer, self.seen = nn.Linear(500, 500).cuda(), []\n"
            "        self.layer.register_forward_hook(lambda layer, given, out: self.seen.append(out.mean()))",
            "for _ in range(4): tap = Tap()",
        ),
        command="%reset_gpu",
        frees=3 * _LINEAR_500,
        leaves="tap.layer(torch.ones(1, 500).cuda()).shape == (1, 500) and len(tap.seen) == 1",
    ),
    "a metric of the user's keeps all predictions": Case(
        source="https://github.com/Lightning-AI/torchmetrics/issues/3294",
        saw="Memory grew with each evaluation. One metric kept predictions and targets in lists until its reset().",
        cells=(_OWN_METRIC + _EVALUATE, *["evaluate()"] * 3),
        command="ranks.reset()",
        frees=3 * 3 * 3 * (1 << 20),
        leaves="ranks.scores == [] and evaluate() is None and len(ranks.scores) == 3",
    ),
    "a metric of a library keeps all predictions": Case(
        source="https://github.com/Lightning-AI/torchmetrics/issues/3294",
        saw="The same, of torchmetrics' own.",
        cells=(
            "from torchmetrics.classification import MultilabelAveragePrecision\n"
            "ranks = MultilabelAveragePrecision(num_labels=2, validate_args=False, compute_on_cpu=False).cuda()" + _EVALUATE,
            *["evaluate()"] * 3,
        ),
        command="ranks.reset()",
        frees=3 * 3 * 3 * (1 << 20),
        leaves="ranks.preds == [] and evaluate() is None and len(ranks.preds) == 3",
        needs="torchmetrics",
    ),
    "trials keep their models": Case(
        source="https://github.com/optuna/optuna/issues/5183",
        saw="A search of hyperparameters kept the model of every trial, stored as the trial's attribute. One was wanted.",
        cells=(_STUDY, "study.optimize(objective, n_trials=4); best = study.trials[2].attributes['net']"),
        command="%reset_gpu study.trials[*].attributes['net']",
        frees=3 * _LINEAR_500,
        leaves="best(torch.ones(1, 500).cuda()).shape == (1, 500) and [trial.score for trial in study.trials] == [0, 1, 2, 3]",
    ),
    "optuna's trials keep their models": Case(
        source="https://github.com/optuna/optuna/issues/5183",
        saw="The same, of Optuna's own storage in memory.",
        cells=(_OPTUNA, "study.optimize(objective, n_trials=4); best = study.best_trial.user_attrs['net']"),
        command="%reset_gpu study._storage._studies[0].trials[*]._user_attrs['net']",
        frees=3 * _LINEAR_500,
        leaves="best(torch.ones(1, 500).cuda()).shape == (1, 500) and [trial.value for trial in study.trials] == [0, 1, 2, 3]",
        needs="optuna",
    ),
    "adapters pile up on a model": Case(
        source="https://github.com/huggingface/peft/issues/738",
        saw="Adapters were loaded into one base model, one after the other. Each stayed.",
        cells=(
            "class Adapted(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.base, self.lora = nn.Linear(64, 64), nn.ModuleDict()\n"
            "    def add_adapter(self, name): self.lora[name] = nn.Linear(600, 600).cuda()\n"
            "    def delete_adapter(self, name): del self.lora[name]\n"
            "net, count = Adapted(), 0",
            *["count += 1; net.add_adapter(f'task{count}')"] * 3,
        ),
        command="net.delete_adapter('task3')",
        frees=(600 * 600 + 600) * 4,
        leaves="list(net.lora) == ['task1', 'task2']",
    ),
    "adapters of peft pile up on a model": Case(
        source="https://github.com/huggingface/peft/issues/738",
        saw="The same, of peft.",
        cells=(_ADAPTERS, *["count += 1; net.add_adapter(f'task{count}', config); net.cuda(); None"] * 3),
        command="net.delete_adapter('task3')",
        frees=2 * 256 * 600 * 4,
        leaves="sorted(net.peft_config) == ['task0', 'task1', 'task2']",
        needs="peft",
    ),
    "Interpretation keeps its learner": Case(
        source="https://github.com/fastai/fastai/issues/3266",
        saw="Results were looked at, then the learner was deleted. Its memory stayed.",
        cells=(
            "from fastai.basics import *\n"
            "from fastai.interpret import Interpretation\n"
            "from torch.utils.data import TensorDataset\n"
            "loader = DataLoader(TensorDataset(torch.randn(32, 10), torch.randn(32, 1)), bs=16)\n"
            "net = nn.Sequential(nn.Linear(10, 9000), nn.ReLU(), nn.Linear(9000, 1))\n"
            "learn = Learner(DataLoaders(loader, loader, device='cuda'), net.cuda(), loss_func=MSELossFlat())\n"
            "learn.remove_cbs([each for each in learn.cbs if each.name == 'progress'])\n"
            "with learn.no_logging(): learn.fit(1)\n"
            "interp = Interpretation.from_learner(learn)",
            "del learn, net",
        ),
        command="%reset_gpu interp.learn",
        frees=12 * 9000 * 4,
        leaves="type(interp).__name__ == 'Interpretation'",
    ),
}
