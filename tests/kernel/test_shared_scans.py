"""How often a real kernel's heap is scanned: one state of the notebook is scanned once, whoever asks for it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.kernels import Kernel
from tests.panels import Panel, settle

_COUNT = """
import nbguard.memory.scan.scan as _scanning, nbguard.memory.scan.devices.counters as _counting
_counting._OFTEN = 1 << 60  # on a busy machine, too, malloc is asked, and if it has been given up already
import nbguard.frontend.sidebar.hub.comms as _comms
_comms.LEASE = 1 << 20  # for a view that says hello once
_scan_of_nbguard, scans = _scanning._scan_without_collecting, []
def _counted(*args):
    scans.append(args[0].is_running)
    return _scan_of_nbguard(*args)
_scanning._scan_without_collecting = _counted
gc.collect()
"""
_COUNT_ANSWERS = """
import nbguard.memory.cleanup.plan.parking as _planning, nbguard.memory.core.analysis as _analysing
answers = {"plan": 0, "holders": 0}
def _counting_calls(name, function):
    def counted(*args):
        answers[name] += 1
        return function(*args)
    return counted
_planning.plan_cleanup = _counting_calls("plan", _planning.plan_cleanup)
_analysing.holdings = _counting_calls("holders", _analysing.holdings)
"""
_FAILS = """
def fails():
    a = torch.ones(3 << 20)
    torch.empty(2**46)
"""


def _count(kernel: Kernel) -> int:
    """Return how many scans there have been. The question itself is no cell."""
    count: int = kernel.value("len(scans)")
    return count


def _scanned_anew(kernel: Kernel, panel: Panel) -> dict[str, Any]:
    """Return the heap as a scan of its own finds it now."""
    before = _count(kernel)
    heap = panel.look()
    assert _count(kernel) == before + 1
    return heap


@pytest.fixture
def counted(kernel: Kernel, panel: Panel) -> Panel:
    """A panel whose kernel counts its scans. It says hello once: another would have a heap that is old scanned again."""
    kernel.run(_COUNT + _FAILS).ok()
    panel.hello(again=False)
    return panel


def test_a_click_scans_three_times(kernel: Kernel, counted: Panel) -> None:
    """For the plan that is shown, for the same plan before it is carried out, and for the outcome, which is the next heap."""
    kernel.run("layer = nn.Linear(1 << 10, 1 << 10)\nlayer").ok()
    kernel.run("layer = None").ok()
    settle(kernel)
    heap = counted.look()
    before = _count(kernel)

    plan = counted.plan("clean_stale")
    outcome = counted.apply(plan)
    after = counted.heap(lambda heap_now: heap_now["heap"] > heap["heap"])

    assert _count(kernel) - before == 3
    assert outcome["realised"] == plan["promised"] == heap["stale"] >= 4 << 20
    assert after["stale"] == 0
    assert after["t"] < time.time()
    assert _scanned_anew(kernel, counted)["heap"] == after["heap"]  # nothing is otherwise


def test_the_listeners_of_a_failed_cell_share_a_scan(kernel: Kernel, counted: Panel) -> None:
    """The card, the line about the cell, and the sidebar a moment later."""
    kernel.run("%gpumem cells on" + _COUNT_ANSWERS).ok()
    for _ in range(2):  # the first imports what the card needs
        settle(kernel)
        heap, before = counted.look(), _count(kernel)
        kernel.value("answers.update(plan=0, holders=0)")
        cell = kernel.run("fails()")
        settle(kernel)

    assert _count(kernel) - before == 1
    assert kernel.value("answers") == {"plan": 1, "holders": 1}  # by one analysis of that scan
    assert "it asked the host for 256 TiB" in cell.text
    assert "+12 MiB → " in cell.text
    assert counted.data("heap")[-1]["heap"]["heap"] > heap["heap"]


def test_with_cleaning_there_is_a_second_scan_of_what_that_has_left(kernel: Kernel, counted: Panel) -> None:
    kernel.run("%nbguard on --auto-clean-errors\n%gpumem cells on").ok()
    for _ in range(2):
        settle(kernel)
        before = _count(kernel)
        cell = kernel.run("fails()")
        settle(kernel)

    assert _count(kernel) - before == 2
    assert "released 12 MiB" in cell.text
    assert counted.data("heap")[-1]["heap"]["stale"] == 0


def test_the_next_cell_and_a_refresh_scan_anew(kernel: Kernel, counted: Panel) -> None:
    kernel.run("%gpumem cells on").ok()
    kernel.run("a = torch.ones(1 << 20)").ok()
    settle(kernel)
    before = _count(kernel)
    kernel.run("b = torch.ones(1 << 20)").ok()
    assert _count(kernel) == before + 1
    settle(kernel)

    labels = {row["label"] for row in _scanned_anew(kernel, counted)["holders"]}

    assert {"a", "b"} <= labels
