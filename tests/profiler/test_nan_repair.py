"""Layers that overflow in float16: tried in float32 on the batch that failed, and what is offered then."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.errors import NbguardError
from nbguard.training.profiler.analysis.nonfinite import nan_findings
from nbguard.training.profiler.nonfinite.float32_layers import in_float32
from nbguard.training.profiler.nonfinite.nonfinite import FiniteWatch
from nbguard.training.profiler.nonfinite.origin import finite_copy, nan_repair
from tests.doctor.untouched import fingerprint
from tests.profiler.recording import recording


class SquareNorm(nn.Module):  # type: ignore[misc]
    """Squares by their mean: in float16 both overflow, and the quotient is NaN; in float32 it is around 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x / (x * x).mean(-1, keepdim=True) * self.weight


class NotAtAll(nn.Module):  # type: ignore[misc]
    """Divides nothing by nothing: no type helps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x) / (x - x)


def net(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 1))


def met(model: nn.Module, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> FiniteWatch:
    """Train a few batches under autocast, the last of them with inputs that many times as large."""
    watch = FiniteWatch()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    with recording(watch):
        for factor in (1.0, 1.0, scale):
            inputs = x * factor
            with torch.autocast("cpu", dtype):
                half = inputs.to(dtype)  # kept alive until the loss is there
                loss = model(half).float().mean()
            loss.backward()
            del half
    return watch


def trial_of(watch: FiniteWatch) -> Any:
    first = watch.observe().first
    assert first is not None
    return first.origin.trial


def test_a_layer_that_overflows_is_tried_in_float32_and_the_repair_is_offered() -> None:
    model = net(SquareNorm())
    watch = met(model, 800.0)
    trial = trial_of(watch)
    assert (trial.dtype, trial.layers, trial.is_finite) == ("float16", ("1",), True)
    assert trial.largest is not None
    assert trial.largest < 100
    (finding,) = nan_findings(watch.observe())
    assert "in float32 it returns finite values on this batch" in finding.evidence
    assert "`%nbguard fix nan`" in finding.change
    repair = nan_repair(model, "model")
    assert repair.layers == ("1",)
    assert repair.line in repair.mimebundle()["text/plain"]
    assert "undo()" in repair.mimebundle()["text/plain"]
    names: dict[str, Any] = {"model": model}
    exec(repair.line, names)
    x = torch.full((4, 4), 3000.0)
    with torch.autocast("cpu", torch.float16):
        assert model(x).isfinite().all()
    names["float32"].undo()
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()


def test_layers_that_fail_next_are_taken_along() -> None:
    grows = nn.Linear(8, 8)
    nn.init.constant_(grows.weight, 3000.0)
    shrinks = nn.Linear(8, 8)
    nn.init.constant_(shrinks.weight, 1e-4)
    model = nn.Sequential(nn.Linear(4, 8), grows, shrinks, nn.Linear(8, 1))
    trial = trial_of(met(model, 100.0))
    assert (trial.layers, trial.is_finite) == (("1", "2"), True)
    assert trial.largest > 65504


def test_what_is_not_finite_in_float32_either_is_said() -> None:
    watch = met(net(NotAtAll()))
    trial = trial_of(watch)
    assert not trial.is_finite
    assert trial.largest is None
    (finding,) = nan_findings(watch.observe())
    assert "in float32 it is not finite either" in finding.evidence
    assert "fix nan" not in finding.change
    assert "compute in float32" not in finding.change
    repair = nan_repair(None, "")
    assert not repair.layers
    assert not repair.line
    assert "float32 does not help here" in repair.mimebundle()["text/plain"]


def test_the_trial_leaves_the_model_as_it_was() -> None:
    model = net(SquareNorm())
    seen: list[dict[str, Any]] = []

    class Watch(FiniteWatch):
        def _origin(self) -> Any:
            before = fingerprint(model)
            origin = super()._origin()
            seen.append({"before": before, "after": fingerprint(model)})
            return origin

    x = torch.randn(4, 4).half() * 3000
    with recording(Watch()), torch.autocast("cpu", torch.float16):
        model(x).float().mean().backward()
    (look,) = seen
    assert look["before"] == look["after"]
    assert type(model[1]) is SquareNorm


def test_a_copy_shares_parameters_and_leaves_the_model_alone() -> None:
    model = net(SquareNorm())
    before = fingerprint(model)
    finite = finite_copy(model, ("1",))
    assert fingerprint(model) == before
    assert [id(one) for one in finite.parameters()] == [id(one) for one in model.parameters()]
    assert list(finite.state_dict()) == list(model.state_dict())
    x = torch.full((4, 4), 3000.0)
    with torch.autocast("cpu", torch.float16):
        assert finite(x).isfinite().all()
        assert not model(x).isfinite().all()


def test_a_model_in_float16_computes_a_layer_in_float32_and_returns_float16() -> None:
    model = net(SquareNorm()).half()
    x = torch.full((4, 4), 3000.0).half()
    with torch.no_grad():
        assert not model(x).isfinite().all()
    with in_float32(model, "1"):
        out = model(x)
        out.sum().backward()
    assert out.dtype is torch.float16
    assert out.isfinite().all()
    assert model[1].weight.grad is not None
    assert model[1].weight.grad.dtype is torch.float16
    assert type(model[1]) is SquareNorm


def test_layers_in_float32_are_copied_and_pickled_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    in_float32(model, "0", "1")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(part).__name__ for part in other] == ["Float32Linear", "Float32LSTM"]
        assert isinstance(other[0], nn.Linear)
        assert torch.equal(other(torch.ones(2, 4))[0], model(torch.ones(2, 4))[0])


@pytest.mark.parametrize(("layers", "words"), [((), "name the layers"), (("7",), "no layer '7'")], ids=["none", "unknown"])
def test_bad_input_is_one_line(layers: tuple[str, ...], words: str) -> None:
    with pytest.raises(NbguardError, match=words):
        in_float32(net(nn.Identity()), *layers)
    with pytest.raises(NbguardError, match="takes a model or a Learner"):
        in_float32(3, "0")
