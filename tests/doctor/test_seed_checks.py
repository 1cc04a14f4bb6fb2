"""Seeds, splits and loaders: read from cells in the order in which they ran, and diagnosed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.training.doctor.analysis.diagnosis import CheckFinding
from nbguard.training.doctor.analysis.seed_checks import LoaderSeeds, SwitchStates, seed_checks
from nbguard.training.runs.analysis.cell_seeds import seeds_in

_SWITCHES = SwitchStates(hash_seed="0")


def findings(*cells: str, loaders: tuple[LoaderSeeds, ...] = (), switches: SwitchStates = _SWITCHES) -> list[CheckFinding]:
    checks = seed_checks(loaders, switches, seeds_in(["", *cells]))
    return [finding for check in checks for finding in check.findings]


CLEAN = {
    "no data": ("x = 1",),
    "seeded split": ("set_seed(1)", "dls = ImageDataLoaders.from_name_func(path, files, label, seed=42)"),
    "splitter by position": ("torch.manual_seed(1)", "DataBlock(splitter=RandomSplitter(0.2, 42)).dataloaders(path)"),
    "folds in order": ("KFold(5); StratifiedKFold(5, shuffle=False)", "random.sample(range(9), 3)"),
    "folds": ("KFold(5, shuffle=True, random_state=0)", "df.sample(frac=1, random_state=1)"),
    "by column": ("set_seed(1); TextDataLoaders.from_df(df, valid_col='v')",),
    "generator": ("seed_everything(3)", "random_split(data, [8, 2], generator=g); DataLoader(data)"),
    "magic": ("%matplotlib inline\nset_seed(1)", "set_seed(2)\nDataLoader(data)"),
    "nbguard's line": ("get_ipython().run_line_magic('nbguard', 'fix determinism --seed 3')", "DataLoaders(a, b)"),
    "nbguard's": ("nbguard.deterministic(3)", "DataLoaders(a, b)"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_repeats_raises_nothing(name: str) -> None:
    assert findings(*CLEAN[name]) == []


FAULTS = {
    "fastai's split": (
        ("dls = ImageDataLoaders.from_name_func(path, files, label, valid_pct=0.2)",),
        "`ImageDataLoaders.from_name_func` in In[1], line 1 splits at random without `seed`",
        "advice",
    ),
    "splitter": (
        ("x = 1\nblock = DataBlock(splitter=RandomSplitter())",),
        "`RandomSplitter` in In[1], line 2",
        "advice",
    ),
    "sklearn's": (("train_test_split(a, b)",), "splits at random without `random_state`", "advice"),
    "folds": (("KFold(5, shuffle=True)",), "splits at random without `random_state`", "advice"),
    "shuffled rows": (("df.sample(frac=1)",), "`df.sample` in In[1], line 1 splits at random without `random_state`", "advice"),
    "torch's": (("torch.utils.data.random_split(data, [8, 2])",), "splits at random without `generator`", "advice"),
    "seeded before": (("set_seed(3)", "RandomSplitter(0.2)"), "`RandomSplitter` in In[2], line 1 splits", "note"),
    "seed too late": (
        ("dls = DataLoaders(a, b)", "set_seed(42)"),
        "`DataLoaders` in In[1], line 1 makes",
        "advice",
    ),
    "no seed": (("dls = block.dataloaders(path)",), "makes loaders before any seed is set", "advice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_cells_is_named(fault: str) -> None:
    cells, what, severity = FAULTS[fault]

    first = findings(*cells)[0]
    assert what in first.what
    assert (first.severity, bool(first.evidence and first.command)) == (severity, True)


def test_a_seed_that_comes_too_late_is_named_with_its_place() -> None:
    assert "In[2], line 1 comes too late" in findings("DataLoaders(a, b)", "set_seed(42)")[0].evidence


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (LoaderSeeds(name="the training loader", shuffles=True), "draws its order from torch's global generator"),
        (LoaderSeeds(name="the training loader", workers=1), "the worker of the training loader is seeded"),
        (LoaderSeeds(name="the training loader", workers=4), "the 4 workers of the training loader are seeded"),
    ],
)
def test_a_loader_without_a_generator_is_named(loader: LoaderSeeds, what: str) -> None:
    (finding,) = findings(loaders=(loader,))
    assert what in finding.what


def test_a_loader_with_a_generator_is_in_order() -> None:
    assert findings(loaders=(LoaderSeeds(name="the training loader", shuffles=True, workers=4, has_generator=True),)) == []
    assert findings(loaders=(LoaderSeeds(name="the training loader", shuffles=True, is_learners=True),)) == []


def test_switches() -> None:
    (finding,) = findings(switches=SwitchStates(hash_seed="0", mode="on", benchmark=True, uses_gpu=True))
    assert (finding.severity, finding.command) == ("advice", "torch.backends.cudnn.benchmark = False")
    (finding,) = findings(switches=SwitchStates())
    assert "PYTHONHASHSEED=0" in finding.command
    allowed = ("torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32")
    of_gpus = SwitchStates(hash_seed="0", needs_cublas=True, tf32=allowed)
    assert findings(switches=of_gpus) == []
    cublas, tf32 = findings(switches=replace(of_gpus, uses_gpu=True))
    assert (cublas.severity, cublas.command.split("   # ")[0]) == ("advice", "export CUBLAS_WORKSPACE_CONFIG=:4096:8")
    assert tf32.severity == "note"
    assert tf32.command == "; ".join(f"{switch} = False" for switch in allowed)


def test_outside_of_a_notebook_cells_are_not_checked() -> None:
    checks = {check.name: check for check in seed_checks((), _SWITCHES, None)}

    assert checks["seeds in cells"].state == "not checked"
    assert checks["loaders' seeds"].state == "not checked"


def test_loaders_that_were_given_a_seed_do_not_depend_on_the_cells_before() -> None:
    seeded = LoaderSeeds(name="the training loader", is_learners=True, shuffles=True, workers=2, has_generator=True)
    other = LoaderSeeds(name="the validation loader", is_learners=True)

    assert findings("dls = block.dataloaders(path)", loaders=(seeded,)) == []
    assert len(findings("dls = block.dataloaders(path)", loaders=(seeded, other))) == 1
