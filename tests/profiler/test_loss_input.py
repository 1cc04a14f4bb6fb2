"""Losses that get something else than they take: each mistake is found, its cure is silent, and healthy losses are, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from nbguard.notebook.profile import profile_fit
from nbguard.profiler.analysis.health.loss_input import LossInputFacts, loss_input_findings
from nbguard.profiler.analysis.report import FitReport
from nbguard.profiler.instruments.health.loss_input import LossInputWatch
from tests.profiler.recording import recording

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")
Loss = Callable[[Any, Any], Any]
X, CLASSES = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
NUMBERS = X.sum(1)


def watched(outputs: int, loss: Loss, target: Any, *last: nn.Module) -> LossInputFacts:
    watch, model = LossInputWatch(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), *last)
    with recording(watch):
        for _ in range(3):
            loss(model(X), target).backward()
    return watch.observe()


def kinds(facts: LossInputFacts) -> list[tuple[str, str]]:
    return [(fact.loss, fact.by) for fact in facts.squashed]


F, SOFTMAX = functional, ("cross_entropy", "softmax")
SQUASHED: list[tuple[int, Loss, Any, tuple[nn.Module, ...], tuple[str, str]]] = [
    (3, F.cross_entropy, CLASSES, (nn.Softmax(1),), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out.softmax(1), y), CLASSES, (), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), CLASSES, (nn.Softmax(1),), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out, F.one_hot(y, 3).float()), CLASSES, (nn.Softmax(1),), SOFTMAX),
    (3, lambda out, y: 0.5 * F.cross_entropy(out, y) / 2 + out.square().mean(), CLASSES, (nn.Softmax(1),), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out.view(2, 8, 3).transpose(1, 2), y.view(2, 8)), CLASSES, (nn.Softmax(1),), SOFTMAX),
    (3, F.cross_entropy, CLASSES, (nn.Sigmoid(),), ("cross_entropy", "sigmoid")),
    (3, F.nll_loss, CLASSES, (nn.Softmax(1),), ("nll_loss", "softmax")),
    (3, F.nll_loss, CLASSES, (), ("nll_loss", "")),
    (1, lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(1), y), (NUMBERS > 0).float(), (nn.Sigmoid(),),
     ("binary_cross_entropy_with_logits", "sigmoid")),
    (3, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float()), CLASSES, (nn.Softmax(1),),
     ("binary_cross_entropy_with_logits", "softmax")),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "loss", "target", "last", "found"), SQUASHED)
def test_logits_that_were_squashed_before(outputs: int, loss: Loss, target: Any, last: Any, found: tuple[str, str]) -> None:
    facts = watched(outputs, loss, target, *last)

    assert kinds(facts) == [found]
    assert facts.squashed[0].layer == (f"3 ({type(last[0]).__name__})" if last else "")
    assert [(f.kind, f.severity, f.concern) for f in loss_input_findings(facts)] == [("loss input", "problem", "result")]


def rmse(out: Any, y: Any) -> Any:
    return (out - y).pow(2).mean().sqrt()


def by_hand(out: Any, y: Any) -> Any:
    error = y - out
    return (error * error).mean()


def weighted(out: Any, y: Any) -> Any:
    return 2 * functional.smooth_l1_loss(out, y) + 0.1 * out.abs().mean()


def in_half(out: Any, y: Any) -> Any:
    return (out.half().float() - y).abs().mean()


PAIRS: list[Loss] = [
    in_half,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    rmse,
    by_hand,
    weighted,
]


@pytest.mark.parametrize("loss", PAIRS)
def test_predictions_and_targets_that_broadcast(loss: Loss) -> None:
    assert [(fact.items, fact.is_column) for fact in watched(1, loss, NUMBERS).broadcast] == [(16, True)]
    flat = watched(1, lambda out, y: loss(out.squeeze(1), y), NUMBERS[:, None])
    assert [(fact.items, fact.is_column) for fact in flat.broadcast] == [(16, False)]
    assert [f.change for f in loss_input_findings(flat)] == ["`output.unsqueeze(1)` before the loss"]


def pairwise(out: Any, y: Any) -> Any:
    """Distances between all predictions and all targets, meant, as in kernels and energy scores."""
    out = out.squeeze(1)
    return (out[:, None] - y[None]).abs().mean() - (out[:, None] - out[None]).pow(2).mean()


def gram(out: Any, _: Any) -> Any:
    return (out @ out.T - torch.eye(len(out))).pow(2).mean()


HEALTHY: list[tuple[int, Loss, Any, tuple[nn.Module, ...]]] = [
    (3, functional.cross_entropy, CLASSES, ()),
    (3, functional.nll_loss, CLASSES, (nn.LogSoftmax(1),)),
    (3, functional.cross_entropy, CLASSES, (nn.LogSoftmax(1),)),  # once more changes nothing
    (3, lambda out, y: functional.nll_loss(out.softmax(1).log(), y), CLASSES, ()),
    (3, lambda out, y: functional.cross_entropy(10 * out.softmax(1), y), CLASSES, ()),  # with a temperature
    (3, lambda out, y: functional.cross_entropy(nn.functional.normalize(out) * 8, y), CLASSES, ()),
    (3, lambda out, y: (out.softmax(1) - functional.one_hot(y, 3)).pow(2).mean(), CLASSES, ()),
    (1, lambda out, y: functional.binary_cross_entropy(out.squeeze(1), y), (NUMBERS > 0).float(), (nn.Sigmoid(),)),
    (1, lambda out, y: functional.binary_cross_entropy_with_logits(out.squeeze(1), y), (NUMBERS > 0).float(), ()),
    *((1, loss, NUMBERS[:, None], ()) for loss in PAIRS),
    *((1, (lambda out, y, loss=loss: loss(out.squeeze(1), y)), NUMBERS, ()) for loss in PAIRS),
    (1, pairwise, NUMBERS, ()),
    (16, gram, NUMBERS, ()),
    (16, lambda out, y: functional.mse_loss(out, y.expand(16, 16)), NUMBERS, ()),
    (16, lambda out, y: (out - y).pow(2).mean(), NUMBERS, ()),  # one target for each of 16 outputs
]


@pytest.mark.parametrize(("outputs", "loss", "target", "last"), HEALTHY)
def test_losses_that_get_what_they_take(outputs: int, loss: Loss, target: Any, last: Any) -> None:
    assert watched(outputs, loss, target, *last) == LossInputFacts()


def fit(model: nn.Module, loss_of: Loss, target: Any) -> tuple[FitReport, float]:
    """Train, and return the report and the loss that was reached."""
    torch.manual_seed(0)
    optimizer, loader = torch.optim.Adam(model.parameters(), 0.05), DataLoader(TensorDataset(X, target), batch_size=8)
    with profile_fit(show=False) as profile:
        for _ in range(60):
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()
    return profile.report, loss.item()


def test_the_advice_cures_a_second_sigmoid() -> None:
    def net(*last: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0), *last)

    right, loss_of = (NUMBERS > 0).float(), nn.BCEWithLogitsLoss()
    ill, stuck = fit(net(nn.Sigmoid()), loss_of, right)
    assert "sigmoid, here `4 (Sigmoid)`," in ill.first[0]
    assert stuck > 0.31
    well, reached = fit(net(), loss_of, right)  # what comes before the sigmoid
    assert "sigmoid" not in "".join(well.first)
    assert reached < 0.1
    other, reached = fit(net(nn.Sigmoid()), nn.BCELoss(), right)
    assert "sigmoid" not in "".join(other.first)
    assert reached < 0.1


def test_the_advice_cures_a_loss_that_broadcasts() -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    ill, stuck = fit(net(), nn.MSELoss(), NUMBERS)
    assert "(8, 1) and (8,) broadcast: `output.squeeze(1)` before the loss" in ill.first[0]
    well, reached = fit(net(), lambda output, y: nn.MSELoss()(output.squeeze(1), y), NUMBERS)
    assert "broadcast" not in "".join(well.first)
    assert reached < 0.1 < stuck


def test_a_learner_with_a_softmax_too_many() -> None:
    from fastai.basics import DataLoaders, Learner

    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=4)
    learn = Learner(DataLoaders(loader, loader), nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), loss_func=nn.CrossEntropyLoss())
    learn.remove_cbs([each for each in learn.cbs if each.name == "progress"])
    with profile_fit(show=False) as profile, learn.no_logging():
        learn.fit(2)
    assert "softmax, here `1 (Softmax)`," in profile.report.first[0]
