"""Cycles through C++: what nothing outside leads to is broken by a cleanup; what C++ may still need is left alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbguard

pytestmark = pytest.mark.usefixtures("frozen_libraries")


def _gradients_with_a_graph() -> None:
    model = nn.Linear(100, 100)
    model(torch.ones(2, 100)).square().sum().backward(create_graph=True)


def _hook_on_its_result() -> None:
    y = torch.ones(1000, requires_grad=True) * 2
    y.register_hook(lambda _: y)


def _hook_after_accumulation() -> None:
    x = torch.ones(1000, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: x)


def _view_on_its_base() -> None:
    base: Any = torch.ones(1000)
    base.view_ = base[:2]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("leave", [_gradients_with_a_graph, _hook_on_its_result, _hook_after_accumulation, _view_on_its_base])
def test_a_cycle_through_cpp_is_broken_and_what_is_named_stays(leave: Callable[[], None]) -> None:
    live = nn.Linear(100, 100)
    live(torch.ones(2, 100)).square().sum().backward(create_graph=True)
    names: dict[str, Any] = {"live": live}
    gc.collect()
    nbguard.release(namespace=names)
    before = nbguard.report(names).devices[0].allocated
    leave()
    gc.collect()
    report = nbguard.report(names)
    (row,) = (row for row in report.devices[0].holders if row.label == "unreachable C++ cycle")

    outcome = nbguard.release(namespace=names)

    assert row.retained == row.stale_bytes == outcome.realised == outcome.plan.promised > 0
    assert nbguard.report(names).devices[0].allocated == before
    assert live.weight.grad is not None
    assert live.weight.grad.grad_fn is not None
    live.zero_grad()


def test_a_model_that_a_hook_on_a_live_graph_keeps_is_left_alone() -> None:
    y = torch.ones(3, requires_grad=True) * 2
    model: Any = nn.Linear(50, 50)
    model.own = [model]
    y.grad_fn.register_hook(lambda *_, kept=model: None)  # type: ignore[union-attr]
    del model
    gc.collect()

    assert nbguard.release(namespace={"y": y}).realised == 0


@pytest.mark.skipif(not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="this PyTorch does not show the tensor")
@pytest.mark.parametrize("beside", [None, _view_on_its_base, _hook_on_its_result])
def test_a_cycle_that_nothing_can_be_taken_from_is_named_and_one_beside_it_broken(beside: Callable[[], None] | None) -> None:
    """PEFT's `merge_adapter` leaves such a cycle with OFT: a graph's tensor has been changed since, into the graph's result."""
    weight: Any = torch.ones(100, 100)
    weight.copy_(torch.ones(100, 100, requires_grad=True) @ weight)
    weak = weakref.ref(weight)
    del weight
    if beside is not None:
        beside()
    gc.collect()
    holders = nbguard.report({}).devices[0].holders

    outcome = nbguard.release(namespace={})

    assert {row.label for row in holders} == {"unreachable C++ cycle"}
    assert sum(row.stale_bytes for row in holders) == outcome.plan.promised == outcome.realised
    assert (outcome.realised > 0) is (beside is not None)
    weak().detach_()  # type: ignore[union-attr]  # the graph was the cycle's
    assert weak() is None
    assert nbguard.report({}).devices[0].allocated == 0
