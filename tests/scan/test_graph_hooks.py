"""Hooks that C++ keeps: what they refer to is held by the graph or the tensor, and goes with it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.memory.cleanup.apply.apply import apply
from nbguard.memory.cleanup.plan.plan import Outcome, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.targets import resolve_targets

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_BYTES = 4 * 50_000


class Box:
    """An object of the user's that a hook refers to."""

    def __init__(self) -> None:
        self.data = torch.ones(50_000)

    def hook(self, *_: Any) -> None:
        """Do nothing with the gradient."""


def _release(names: dict[str, Any], *targets: str) -> Outcome:
    notebook = Notebook(shell=None, namespace=names)
    seen = scan(notebook)
    request = Request(targets=resolve_targets(targets, names, {}, {}))
    return apply(plan_cleanup(seen.facts, request), notebook, seen).outcome


def _leaf() -> Any:
    return torch.ones(1000, requires_grad=True)


def _on_a_leaf(box: Box) -> dict[str, Any]:
    leaf = _leaf()
    leaf.register_hook(box.hook)
    return {"leaf": leaf}


def _on_a_leafs_gradient(box: Box) -> dict[str, Any]:
    leaf = _leaf()
    leaf.register_post_accumulate_grad_hook(box.hook)
    return {"leaf": leaf}


def _on_a_result(box: Box) -> dict[str, Any]:
    result = _leaf() * 2
    result.register_hook(box.hook)
    return {"result": result}


def _on_a_result_and_what_follows(box: Box) -> dict[str, Any]:
    result = _leaf() * 2
    result.register_hook(box.hook)
    return {"result": result, "loss": result.sum()}


def _on_a_result_that_is_gone(box: Box) -> dict[str, Any]:
    return {"loss": _on_a_result(box)["result"].sum()}


def _on_one_of_two_graphs(box: Box) -> dict[str, Any]:
    return {"other": (_leaf() * 3).sum(), **_on_a_result_that_is_gone(box)}


def _on_a_node(box: Box) -> dict[str, Any]:
    result: Any = _leaf() * 2
    result.grad_fn.register_hook(box.hook)
    return {"loss": result.sum()}


def _before_a_node(box: Box) -> dict[str, Any]:
    result: Any = _leaf() * 2
    result.grad_fn.register_prehook(box.hook)
    return {"loss": result.sum()}


def _of_a_module(box: Box) -> dict[str, Any]:
    net = nn.Linear(10, 10)
    handle = net.register_full_backward_hook(box.hook)
    loss = net(torch.ones(2, 10)).sum()
    handle.remove()
    return {"loss": loss, "net": net}


@pytest.mark.parametrize(
    "make",
    [
        _on_a_leaf,
        _on_a_leafs_gradient,
        _on_a_result,
        _on_a_result_and_what_follows,
        _on_a_result_that_is_gone,
        _on_one_of_two_graphs,
        _on_a_node,
        _before_a_node,
        _of_a_module,
    ],
)
def test_what_a_hook_refers_to_goes_with_its_graph(make: Callable[[Box], dict[str, Any]]) -> None:
    box = Box()
    names = {**make(box), "box": box}
    del box

    labels = [root.label for root in scan(Notebook(shell=None, namespace=names)).facts.graph.roots]
    assert sorted(labels) == sorted(names), "no other holder is named"
    assert _release(names, "box").realised == 0
    names["box"] = next(each for each in gc.get_objects() if type(each) is Box)
    outcome = _release(names, *names)

    assert (outcome.realised, outcome.extra, outcome.survivors) == (outcome.plan.promised, 0, ())
    assert outcome.realised > _BYTES


@pytest.mark.parametrize("make", [_on_a_leafs_gradient, _on_a_result, _on_a_node], ids=lambda make: make.__name__.strip("_"))
def test_a_hook_that_leads_back_to_its_graph_is_not_promised(make: Callable[[Box], dict[str, Any]]) -> None:
    """PyTorch's tutorial on optimizers that step in the backward pass has such hooks, in a function of their own."""
    box = Box()
    names = make(box)
    box.own = [*names.values()]  # type: ignore[attr-defined]
    del box
    targets = [*names]

    outcome = _release(names, *targets)

    assert (outcome.plan.promised, outcome.realised, outcome.extra) == (0, 0, 0)
    assert [*names] == targets
    next(each for each in gc.get_objects() if type(each) is Box).own.clear()


def test_a_hook_on_a_result_of_a_failed_cell_is_no_holder_for_good() -> None:
    def passed_on(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> None:
            return function(*args)

        return wrapper

    class Explainer:
        def __init__(self, box: Box) -> None:
            self.box = box

        @passed_on
        def explain(self, given: torch.Tensor) -> None:
            result = given * 2
            result.register_hook(self.box.hook)
            self._fail(result.sum())

        def _fail(self, loss: torch.Tensor) -> None:
            raise IndexError(str(loss.shape))

    def cell(explainer: Explainer) -> None:
        try:
            explainer.explain(_leaf())
        except IndexError as error:
            error.own = error  # type: ignore[attr-defined]

    names = {"explainer": Explainer(Box())}
    gc.disable()
    try:
        cell(names["explainer"])
        report = nbguard.report(names)
    finally:
        gc.enable()

    labels = {holder.label for holder in report.devices[0].holders}
    assert labels <= {"explainer", "unreachable cycles"}
    assert all("freed only with the kernel" not in finding.sentence for finding in report.findings)
    outcome = _release(names, "explainer")
    assert (outcome.realised, outcome.extra, outcome.survivors) == (outcome.plan.promised, 0, ())
