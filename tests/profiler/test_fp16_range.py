"""The range of float16: a warning before an activation becomes infinite or a gradient becomes 0, and none otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.training.profiler.checks.fp16_range import RangeFacts, RangeWatch, range_findings
from tests.profiler.recording import generators, recording, seed


def model_with(factor: float = 1.0) -> nn.Sequential:
    seed()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model


def train(
    model: nn.Module,
    *parts: Any,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda out: out.float().square().mean(),
    dtype: torch.dtype | None = torch.float16,
    batches: int = 8,
) -> list[str]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    losses = []
    with recording(*parts):
        for _ in range(batches):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                value = loss(model(x))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(repr(value.item()))
    return losses


def looked(**how: Any) -> RangeFacts:
    watch = RangeWatch()
    watch._next_look = _Always()
    train(how.pop("model", None) or model_with(), watch, **how)
    return watch.observe()


class _Always(dict[str, int]):
    """A time that has always come: what a look costs must not decide about a test."""

    def __getitem__(self, _: str) -> int:
        return 0


def test_a_layer_near_the_end_of_the_range_is_named() -> None:
    facts = looked(model=model_with(60_000.0))
    assert facts.largest is not None
    assert facts.largest.layer == "2"
    (finding,) = range_findings(facts)
    assert (finding.kind, finding.severity) == ("range", "advice")
    assert finding.what.startswith("the module `2` (Linear)")


def test_gradients_that_vanish_are_named() -> None:
    (finding,) = range_findings(looked(loss=lambda out: out.float().square().mean() * 1e-4))
    assert "of the gradient of `2.weight` is zero" in finding.what


@pytest.mark.parametrize("factor", [1e-5, 1e-7], ids=["of some", "of all"])
def test_gradients_that_are_zero_throughout_are_counted(factor: float) -> None:
    facts = looked(loss=lambda out: out.float().square().mean() * factor)
    assert facts.empty
    (finding,) = range_findings(facts)
    assert f"{facts.empty} of {facts.gradients} sampled gradients are all zero" in finding.what


def test_a_scale_of_the_loss_is_taken_into_account() -> None:
    facts = looked(loss=lambda out: out.float().square().mean() * 2.0**16)
    assert not range_findings(facts)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_other_types_are_not_looked_at(dtype: torch.dtype | None) -> None:
    assert looked(model=model_with(60_000.0), dtype=dtype) == RangeFacts()


def test_dead_units_and_inputs_are_no_alarm() -> None:
    model = model_with()
    with torch.no_grad():
        model[0].bias[:24] = -1e3  # most of the units are dead for every item
    assert not range_findings(looked(model=model, loss=lambda out: out.float().square().mean() * 100))


def test_the_fit_is_as_without_it_and_no_hook_stays() -> None:
    hooks = len(nn.modules.module._global_forward_hooks)
    plain = train(model_with())
    before = generators()
    watch = RangeWatch()
    watch._next_look = _Always()
    watched = train(model_with(), watch)
    assert watched == plain
    assert generators() == before
    assert len(nn.modules.module._global_forward_hooks) == hooks
    assert watch.observe().batches
