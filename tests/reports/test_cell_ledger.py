"""The ledger of cells: what counters and holders before and after a cell say, and nothing that they do not."""

from __future__ import annotations

import pytest

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Counted
from nbguard.memory.reports.cell_ledger import (
    NOTHING,
    NOTICED,
    PROCESS,
    CellHoldings,
    CellRecord,
    DeviceChange,
    Reading,
    Share,
    cell_holdings,
    changes,
    compare,
)
from nbguard.testing import make_facts, make_graph

MiB = 1024**2


def _cuda(allocated: int, peak: int, reserved: int = 100, allocations: int = 1, device: str = "cuda:0") -> Reading:
    return Reading((Counted(device=device, allocated=allocated, reserved=reserved, peak=peak, allocations=allocations),))


def test_a_peak_is_told_only_if_it_is_the_highest_ever() -> None:
    (higher,) = changes(_cuda(10, 50), _cuda(20, 70))
    (same,) = changes(_cuda(10, 50), _cuda(20, 50))
    (reset,) = changes(_cuda(10, 50), _cuda(20, 30))

    assert (higher.peak, higher.limit) == (70, None)
    assert (same.peak, same.limit) == (None, 50)
    assert (reset.peak, reset.limit) == (None, None)


def test_what_happened_between_two_cells_is_told_apart() -> None:
    (change,) = changes(_cuda(30, 50), _cuda(35, 50), last=_cuda(10, 50))

    assert (change.delta, change.between) == (5, 20)


def test_a_device_that_was_not_in_use_began_with_nothing() -> None:
    first, second = changes(_cuda(10, 10), Reading((*_cuda(10, 10).devices, *_cuda(7, 9, device="cuda:1").devices)))

    assert not first.is_changed
    assert (second.device, second.before, second.after, second.peak) == ("cuda:1", 0, 7, 9)


def test_memory_freed_and_allocated_anew_differs() -> None:
    assert _cuda(10, 50, allocations=1).differs(_cuda(10, 50, allocations=2))
    assert not _cuda(10, 50).differs(_cuda(10, 50))


@pytest.mark.parametrize(("heap", "differs"), [(0, False), (NOTICED - 1, False), (NOTICED, True), (-NOTICED, True)])
def test_the_heap_of_the_process_differs_from_a_mebibyte_on(heap: int, differs: bool) -> None:
    assert Reading(heap=50 * MiB + heap).differs(Reading(heap=50 * MiB)) is differs


def test_an_unknown_heap_is_never_taken_for_unchanged() -> None:
    assert Reading(heap=None).differs(Reading(heap=None))
    assert Reading(heap=1).differs(None)


def test_two_ways_to_count_are_not_compared() -> None:
    malloc, resident = Reading(heap=50 * MiB, source="malloc"), Reading(heap=50 * MiB, source="resident")

    assert resident.differs(malloc)
    assert resident.grown_since(malloc) is None
    assert Reading(heap=51 * MiB, source="malloc").grown_since(malloc) == MiB


def _held(**storages: tuple[int, str, bool]) -> CellHoldings:
    found = {("cpu", hash(name), nbytes): (label, stale) for name, (nbytes, label, stale) in storages.items()}
    return CellHoldings(found, {}, {})


def test_what_came_went_and_became_stale_re_adds() -> None:
    before = _held(a=(10, "learn", False), b=(20, "old", False), c=(5, "x", False))
    after = _held(
        a=(10, "Out[3]", True), c=(5, "x", False), d=(40, "losses", False), e=(7, "x", False), f=(3, "last error", True)
    )

    came, went, stale = compare(before, after)

    assert came == (Share("cpu", "losses", 40, is_new=True), Share("cpu", "x", 7, is_new=False))
    assert went == (Share("cpu", "old", 20),)
    assert stale == (Share("cpu", "Out[3]", 10), Share("cpu", "last error", 3))
    grown = 40 + 7 + 3 - 20
    assert after.on_cpu - before.on_cpu == grown


def test_another_holder_of_the_same_memory_is_no_change() -> None:
    assert compare(_held(a=(10, "learn", False)), _held(a=(10, "learn = best", False))) == ((), (), ())


def test_what_was_stale_before_is_not_told_again() -> None:
    held = _held(a=(10, "Out[3]", True))

    assert compare(held, held) == ((), (), ())
    assert compare(held, NOTHING)[1] == (Share("cpu", "Out[3]", 10),)


def test_bytes_that_python_does_not_hold_are_compared_by_kind() -> None:
    before = {("cuda:0", "a"): 5, ("cuda:0", "b"): 9, ("cuda:1", "b"): 4}
    after = {("cuda:0", "a"): 8, ("cuda:0", "b"): 1, ("cuda:0", "c"): 2, ("cuda:1", "b"): 5}
    came, went, _ = compare(CellHoldings({}, before, {}), CellHoldings({}, after, {}))

    assert came == (Share("cuda:0", "a", 3), Share("cuda:0", "c", 2, is_new=True), Share("cuda:1", "b", 1))
    assert went == (Share("cuda:0", "b", 8),)


def test_stale_is_what_a_cleanup_would_free() -> None:
    """A displayed Learner goes, a displayed tensor stays: it may be the user's only copy."""
    graph = make_graph(
        {"x": ["x"], "Out[3]": ["l"], "Out[4]": ["t"]},
        storages={"x": 1, "l": 20, "t": 300},
        kinds={"l": "learner", "t": "tensor", "x": "tensor"},
    )

    found = cell_holdings(Analysis(make_facts(graph)))

    assert sorted(found.storages.values()) == [("Out[3]", True), ("Out[4]", False), ("x", False)]
    assert found.names == {"x": graph.nodes[0].ref}
    assert found.on_cpu == 321


def test_a_line_is_for_what_changed() -> None:
    same, more = DeviceChange(device="cuda:0", before=5, after=5), DeviceChange(device="cuda:0", before=5, after=6)

    assert not CellRecord(cell=1, raised=True, devices=(same,)).is_worth_a_line
    assert CellRecord(cell=1, raised=False, devices=(same, more)).is_worth_a_line
    assert CellRecord(cell=1, raised=False, devices=(same,), stale=(Share("cuda:0", "Out[1]", 1),)).is_worth_a_line


@pytest.mark.parametrize("device", ["cpu", PROCESS])
def test_of_host_memory_a_line_is_for_a_mebibyte(device: str) -> None:
    assert not CellRecord(
        cell=1, raised=False, devices=(DeviceChange(device=device, before=0, after=NOTICED - 1),)
    ).is_worth_a_line
    assert CellRecord(cell=1, raised=False, devices=(DeviceChange(device=device, before=0, after=NOTICED),)).is_worth_a_line
    assert CellRecord(
        cell=1, raised=False, devices=(DeviceChange(device=device, before=9, after=9),), went=(Share(device, "x", NOTICED),)
    ).is_worth_a_line
