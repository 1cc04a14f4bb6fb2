"""Losses that get something else than they take: each mistake is found, its cure is silent, and healthy losses are, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.checks.loss_input import LossInputFacts, LossInputWatch, loss_input_findings
from tests.profiler.recording import recording

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")
Loss = Callable[[Any, Any], Any]
Target = Callable[[], Any]


@cache
def inputs() -> torch.Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def classes() -> torch.Tensor:
    return torch.arange(16) % 3


def numbers() -> torch.Tensor:
    return inputs().sum(1)


def column() -> torch.Tensor:
    return numbers()[:, None]


def signs() -> torch.Tensor:
    return (numbers() > 0).float()


def watched(outputs: int, loss: Loss, target: Target, *last: Callable[[], nn.Module]) -> LossInputFacts:
    watch, model = (
        LossInputWatch(),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs), *(make() for make in last)),
    )
    with recording(watch):
        for _ in range(3):
            loss(model(inputs()), target()).backward()
    return watch.observe()


def kinds(facts: LossInputFacts) -> list[tuple[str, str]]:
    return [(fact.loss, fact.by) for fact in facts.squashed]


F, SOFTMAX = functional, ("cross_entropy", "softmax")
SQUASHED: list[tuple[int, Loss, Target, tuple[Callable[[], nn.Module], ...], tuple[str, str]]] = [
    (3, F.cross_entropy, classes, (partial(nn.Softmax, 1),), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out.softmax(1), y), classes, (), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), classes, (partial(nn.Softmax, 1),), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out, F.one_hot(y, 3).float()), classes, (partial(nn.Softmax, 1),), SOFTMAX),
    (3, lambda out, y: 0.5 * F.cross_entropy(out, y) / 2 + out.square().mean(), classes, (partial(nn.Softmax, 1),), SOFTMAX),
    (3, lambda out, y: F.cross_entropy(out.view(2, 8, 3).mT, y.view(2, 8)), classes, (partial(nn.Softmax, 1),), SOFTMAX),
    (3, F.cross_entropy, classes, (nn.Sigmoid,), ("cross_entropy", "sigmoid")),
    (3, F.nll_loss, classes, (partial(nn.Softmax, 1),), ("nll_loss", "softmax")),
    (3, F.nll_loss, classes, (), ("nll_loss", "")),
    (1, lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(1), y), signs, (nn.Sigmoid,),
     ("binary_cross_entropy_with_logits", "sigmoid")),
    (3, lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 3).float()), classes, (partial(nn.Softmax, 1),),
     ("binary_cross_entropy_with_logits", "softmax")),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "loss", "target", "last", "found"), SQUASHED)
def test_logits_that_were_squashed_before(outputs: int, loss: Loss, target: Target, last: Any, found: tuple[str, str]) -> None:
    facts = watched(outputs, loss, target, *last)

    assert kinds(facts) == [found]
    assert facts.squashed[0].layer == (f"3 ({type(last[0]()).__name__})" if last else "")
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
    assert [(fact.items, fact.is_column) for fact in watched(1, loss, numbers).broadcast] == [(16, True)]
    flat = watched(1, lambda out, y: loss(out.squeeze(1), y), column)
    assert [(fact.items, fact.is_column) for fact in flat.broadcast] == [(16, False)]
    assert [f.change for f in loss_input_findings(flat)] == ["`output.unsqueeze(1)` before the loss"]


@pytest.mark.parametrize("loss", PAIRS)
def test_maps_with_a_channel_and_without_broadcast_over_the_batch(loss: Loss) -> None:
    """Masks of a segmentation: (4, 1, 6, 6) against (4, 6, 6) are all pairs of four maps."""
    pictures, masks = torch.randn(4, 3, 6, 6), torch.randn(4, 6, 6)

    def seen(output: Callable[[Any], Any], target: Any) -> LossInputFacts:
        watch, model = LossInputWatch(), nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 1, 1))
        with recording(watch):
            for _ in range(3):
                loss(output(model(pictures)), target).backward()
        return watch.observe()

    (ill,) = seen(lambda out: out, masks).broadcast
    assert (ill.items, ill.is_column, ill.rest) == (4, True, (6, 6))
    (finding,) = loss_input_findings(LossInputFacts((), (ill,)))
    assert "(4, 1, 6, 6) and (4, 6, 6) broadcast" in finding.what
    line = finding.change.split("`")[1].replace("output", "out")
    assert seen(eval(f"lambda out: {line}"), masks) == LossInputFacts()
    (other,) = seen(lambda out: out.squeeze(1), masks[:, None]).broadcast
    assert (other.is_column, other.rest) == (False, (6, 6))
    assert seen(lambda out: out, masks[:, None]) == LossInputFacts()


def pairwise(out: Any, y: Any) -> Any:
    """Distances between all predictions and all targets, meant, as in kernels and energy scores."""
    out = out.squeeze(1)
    return (out[:, None] - y[None]).abs().mean() - (out[:, None] - out[None]).pow(2).mean()


def gram(out: Any, _: Any) -> Any:
    return (out @ out.T - torch.eye(len(out))).pow(2).mean()


HEALTHY: list[tuple[int, Loss, Target, tuple[Callable[[], nn.Module], ...]]] = [
    (3, functional.cross_entropy, classes, ()),
    (3, functional.nll_loss, classes, (partial(nn.LogSoftmax, 1),)),
    (3, functional.cross_entropy, classes, (partial(nn.LogSoftmax, 1),)),  # once more changes nothing
    (3, lambda out, y: functional.nll_loss(out.softmax(1).log(), y), classes, ()),
    (3, lambda out, y: functional.cross_entropy(10 * out.softmax(1), y), classes, ()),  # with a temperature
    (3, lambda out, y: functional.cross_entropy(nn.functional.normalize(out) * 8, y), classes, ()),
    (3, lambda out, y: (out.softmax(1) - functional.one_hot(y, 3)).pow(2).mean(), classes, ()),
    (1, lambda out, y: functional.binary_cross_entropy(out.squeeze(1), y), signs, (nn.Sigmoid,)),
    (1, lambda out, y: functional.binary_cross_entropy_with_logits(out.squeeze(1), y), signs, ()),
    *((1, loss, column, ()) for loss in PAIRS),
    *((1, (lambda out, y, loss=loss: loss(out.squeeze(1), y)), numbers, ()) for loss in PAIRS),
    (1, pairwise, numbers, ()),
    (3, lambda out, y: (out - torch.stack([y, y, y], 1)[:, None]).pow(2).mean(), numbers, ()),  # distances of all points
    (16, gram, numbers, ()),
    (16, lambda out, y: functional.mse_loss(out, y.expand(16, 16)), numbers, ()),
    (16, lambda out, y: (out - y).pow(2).mean(), numbers, ()),  # one target for each of 16 outputs
]


@pytest.mark.parametrize(("outputs", "loss", "target", "last"), HEALTHY)
def test_losses_that_get_what_they_take(outputs: int, loss: Loss, target: Target, last: Any) -> None:
    assert watched(outputs, loss, target, *last) == LossInputFacts()


def fit(model: nn.Module, loss_of: Loss, target: Target) -> tuple[FitReport, float]:
    """Train, and return the report and the loss that was reached."""
    torch.manual_seed(0)
    optimizer, loader = torch.optim.Adam(model.parameters(), 0.05), DataLoader(TensorDataset(inputs(), target()), batch_size=8)
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

    right, loss_of = signs, nn.BCEWithLogitsLoss()
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

    ill, stuck = fit(net(), nn.MSELoss(), numbers)
    assert "(8, 1) and (8,) broadcast: `output.squeeze(1)` before the loss" in ill.first[0]
    well, reached = fit(net(), lambda output, y: nn.MSELoss()(output.squeeze(1), y), numbers)
    assert "broadcast" not in "".join(well.first)
    assert reached < 0.1 < stuck


def test_a_learner_with_a_softmax_too_many() -> None:
    from fastai.basics import DataLoaders, Learner

    loader = DataLoader(TensorDataset(inputs(), classes()), batch_size=4)
    learn = Learner(DataLoaders(loader, loader), nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), loss_func=nn.CrossEntropyLoss())
    learn.remove_cbs([each for each in learn.cbs if each.name == "progress"])
    with profile_fit(show=False) as profile, learn.no_logging():
        learn.fit(2)
    assert "softmax, here `1 (Softmax)`," in profile.report.first[0]
