"""A graph's own copies of results are the graph's, also where a dispatch mode has made objects of Python's of them."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import nbguard
from nbguard.memory.allocator.model.settings import parse_version
from nbguard.memory.core.references.holders import holders
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.storage_events import AllocationLines

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_SIZE = 50_000
_BYTES = 4 * _SIZE


def _activations() -> torch.Tensor:
    """Compute something whose graph keeps two results of its own: those of `exp` and of `sigmoid`."""
    start = torch.ones(_SIZE, requires_grad=True)
    return start.exp().sigmoid().sum()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "%gpumem leak": AllocationLines,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_name_frees_the_copies_that_its_graph_keeps(mode: str) -> None:
    gc.collect()
    names = {}
    with MODES[mode]():
        names["loss"] = _activations()

    rows = {row.label: row.retained for row in holders(scan(Notebook(shell=None, namespace=names)).facts.graph)}
    outcome = nbguard.release("loss", namespace=names)

    assert rows["loss"] == 3 * _BYTES + 4
    assert not [label for label in rows if "libraries" in label]
    assert (outcome.realised, outcome.extra, outcome.plan.promised) == (rows["loss"], 0, rows["loss"])


@pytest.mark.skipif(
    parse_version(torch.__version__) < (2, 13), reason="PyTorch 2.8 has such copies as a library has: they are not promised"
)
def test_copies_in_unreachable_cycles_are_promised() -> None:
    gc.collect()
    gc.disable()
    try:
        with FlopCounterMode(display=False):
            cycle = [_activations()]
        cycle.append(cycle)
        del cycle

        outcome = nbguard.release(namespace={})
    finally:
        gc.enable()

    assert outcome.plan.promised >= 3 * _BYTES
    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)


def test_a_copy_that_a_library_has_of_a_graphs_result_is_the_librarys(library: types.ModuleType) -> None:
    """The gradient of a library's tensor: nothing in Python refers to it, and it shares the result of a graph."""
    names = {"result": torch.ones(_SIZE, requires_grad=True).exp()}
    theirs = torch.ones(_SIZE, requires_grad=True)
    theirs.grad = names["result"].detach()
    library.__dict__["theirs"] = theirs
    del theirs

    outcome = nbguard.release("result", namespace=names)

    assert outcome.plan.promised == _BYTES  # the leaf below the result, not the result
    assert (outcome.realised, outcome.extra) == (outcome.plan.promised, 0)
