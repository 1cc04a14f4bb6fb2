"""Pinned host memory by the counters that torch has: as they were read from several versions, and what may be said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, PinnedFacts
from nbguard.memory.reports.report import build_report
from nbguard.memory.scan.devices.kept_memory import pinned_of
from nbguard.testing import make_facts, make_graph

MIB = 2**20


def _stats(active: int, allocated: int, freed: int) -> dict[str, int]:
    return {"active_bytes.current": active, "allocated_bytes.current": allocated, "active_bytes.freed": freed}


@pytest.mark.parametrize(
    ("active", "allocated", "freed"),
    [
        (4096, 4096, 0),  # one tensor of 4000 bytes
        (8192, 8192, 0),  # a second; and so still once the first is deleted
        (12288, 8192, 0),  # its block used again
        (12288, 8192, -1),  # both deleted, one of them after a copy of the device's
        (12688, 8196, 0),  # a hundred calls of item()
    ],
)
def test_a_counter_that_never_goes_down_says_nothing(active: int, allocated: int, freed: int) -> None:
    """Read from torch 2.11 and 2.12, step by step."""
    assert pinned_of(_stats(active, allocated, freed), counts_freed=False) == PinnedFacts(None, allocated)


def test_an_emptied_cache_leaves_no_pinned_memory() -> None:
    assert pinned_of(_stats(8401321, 0, 0), counts_freed=False) is None
    assert pinned_of(_stats(0, 0, 12688), counts_freed=True) is None


@pytest.mark.parametrize(
    ("active", "allocated", "freed"), [(4096, 4096, 0), (8192, 8192, 0), (4096, 8192, 4096), (0, 8192, 12288), (0, 8196, 12688)]
)
def test_a_counter_that_goes_down_tells_what_is_in_use(active: int, allocated: int, freed: int) -> None:
    """Read from torch 2.13, step by step."""
    assert pinned_of(_stats(active, allocated, freed), counts_freed=True) == PinnedFacts(active, allocated)


def test_the_figures_decide_where_they_contradict_the_version() -> None:
    assert pinned_of(_stats(4096, 8192, 4096), counts_freed=False) == PinnedFacts(4096, 8192)
    for active, freed in ((9000, 4096), (-88, 4096), (4096, -1)):
        assert pinned_of(_stats(active, 8192, freed), counts_freed=True) == PinnedFacts(None, 8192)


def test_the_counters_of_torch_2_7_tell_what_is_held() -> None:
    stats = {"allocated_bytes.current": 4096, "reserved_bytes.current": 8192}

    assert pinned_of(stats, counts_freed=False) == PinnedFacts(None, 8192)


def _facts(pinned: PinnedFacts | None) -> Facts:
    return replace(make_facts(make_graph({"x": ["x"]}, {}, {"x": MIB}, {"x": "tensor"})), pinned=pinned)


def test_what_is_not_known_is_neither_shown_as_a_figure_nor_promised() -> None:
    facts = _facts(PinnedFacts(None, 4 * MIB + 8196))

    text = build_report(Analysis(facts)).mimebundle()["text/plain"]
    plan = plan_cleanup(facts, Request(workers=True, hard=True))

    assert "pinned host memory 4.01 MiB (not of the device): this PyTorch does not tell how much of it is in use" in text
    (action,) = (action for action in plan.actions if action.kind == "pinned")
    assert (action.nbytes, action.host) == (0, None)
    assert action.detail == "how much of 4.01 MiB that is, this PyTorch does not tell"
    assert "host memory" not in plan.mimebundle()["text/plain"].splitlines()[-1]


@pytest.mark.parametrize("pinned", [PinnedFacts(None, MIB - 1), PinnedFacts(4, MIB - 1), None])
def test_less_than_a_mebibyte_is_not_mentioned(pinned: PinnedFacts | None) -> None:
    """Each value that is read from a device pins some bytes."""
    facts = _facts(pinned)

    assert "pinned host memory" not in build_report(Analysis(facts)).mimebundle()["text/plain"]
    assert "pinned" not in [action.kind for action in plan_cleanup(facts, Request(workers=True, hard=True)).actions]
