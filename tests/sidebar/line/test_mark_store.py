"""Marks: each cell with its peak, epochs that end, requests that failed."""

from __future__ import annotations

from nbguard.frontend.sidebar.memory_line import CELLS, EPOCHS, AllocatorPeak, MarkStore, MemoryLine
from nbguard.frontend.sidebar.protocol.state import DevicePeak, LinePoint, TimeMark
from nbguard.memory.core.facts import TickReading
from nbguard.units import GiB

NOW = 1_790_000_000.0
GPU = "cuda:0"


def counters(allocated: int, peak: int | None) -> dict[str, AllocatorPeak]:
    return {GPU: AllocatorPeak(allocated=allocated, peak=peak)}


def reading(t: float, nbytes: int) -> dict[str, LinePoint]:
    return {GPU: LinePoint(t, t, nbytes, nbytes, nbytes, None, None, None)}


def cells(store: MarkStore) -> list[TimeMark]:
    return [mark for mark in store.marks(0) if mark.kind == "cell"]


def test_a_cells_peak_is_the_counters_once_that_has_risen_in_it() -> None:
    store = MarkStore()
    store.begin_cell(NOW, 3, "abc", counters(5, 20))
    store.observe(reading(NOW + 1, 12), {GPU: 20})
    running = cells(store)[0]
    store.observe(reading(NOW + 2, 8), {GPU: 31})
    store.end_cell(NOW + 3, counters(6, 31))

    assert (running.label, running.cell, running.cell_id, running.end) == ("In[3]", 3, "abc", None)
    assert running.peaks == (DevicePeak(GPU, 12, is_exact=False),)
    (ended,) = cells(store)
    assert (ended.end, ended.peaks) == (NOW + 3, (DevicePeak(GPU, 31, is_exact=True),))


def test_a_short_cell_ends_within_the_line_that_begins_at_the_reading_before_it() -> None:
    line = MemoryLine()
    line.add(NOW + 0.03, {}, TickReading())
    line.begin_cell(NOW + 0.035, 3, "", {})
    line.end_cell(NOW + 0.04, counters(0, 3 * GiB), None)
    line.add(NOW + 0.28, reading(NOW + 0.28, 0), TickReading())
    (mark,) = line.newest_marks()
    points = line.history(0, 2).lines[0].points
    assert mark.t >= points[0].since
    assert mark.end is not None
    assert mark.end >= points[0].since


def test_a_lower_peak_than_before_is_the_most_that_was_read() -> None:
    store = MarkStore()
    store.begin_cell(NOW, 4, "", counters(5, 20))
    store.observe(reading(NOW + 1, 12), {GPU: 20})
    store.end_cell(NOW + 2, counters(14, 20))

    assert cells(store)[0].peaks == (DevicePeak(GPU, 14, is_exact=False),)


def test_counters_that_somebody_reset_or_that_were_not_read_make_no_peak_exact() -> None:
    store = MarkStore()
    store.begin_cell(NOW, 4, "", counters(5, 20))
    store.end_cell(NOW + 2, counters(9, 12))  # torch.cuda.reset_peak_memory_stats()
    store.begin_cell(NOW + 3, 5, "", None)
    store.observe(reading(NOW + 4, 12), {GPU: 20})
    store.end_cell(NOW + 5, counters(9, 20))
    store.begin_cell(NOW + 6, 6, "", {})  # the device is not in use yet
    store.end_cell(NOW + 7, counters(9, 20))

    assert [cell.peaks[0] for cell in cells(store)] == [(GPU, 9, False), (GPU, 12, False), (GPU, 20, True)]


def test_epochs_have_an_end_and_do_not_go_on_after_the_fit() -> None:
    store = MarkStore()
    for second, number in enumerate((1, 1, None, 2, 2, 3)):
        store.follow_epoch(NOW + second, number, is_fitting=True)
    store.follow_epoch(NOW + 6, None, is_fitting=False)
    for second in range(7, 600):
        store.follow_epoch(NOW + second, None, is_fitting=False)

    assert [(mark.label, mark.t - NOW, (mark.end or 0) - NOW) for mark in store.marks(0)] == [
        ("epoch 1", 0, 3),
        ("epoch 2", 3, 5),
        ("epoch 3", 5, 6),
    ]


def test_a_fit_that_is_out_of_sight_for_a_moment_goes_on() -> None:
    store = MarkStore()
    store.follow_epoch(NOW, 1, is_fitting=True)
    store.follow_epoch(NOW + 1, None, is_fitting=False)
    store.follow_epoch(NOW + 2, 1, is_fitting=True)
    store.follow_epoch(NOW + 60, None, is_fitting=False)
    store.follow_epoch(NOW + 90, 1, is_fitting=True)  # another fit

    assert [(mark.t - NOW, mark.end and mark.end - NOW) for mark in store.marks(0)] == [(0, 60), (90, None)]


def test_epochs_push_out_no_cell_and_all_is_bounded() -> None:
    store = MarkStore()
    for number in range(3):
        store.begin_cell(NOW + number, number, "", None)
        store.end_cell(NOW + number, None)
    for epoch in range(10 * EPOCHS):
        store.follow_epoch(NOW + 10 + epoch, epoch, is_fitting=True)
    assert [mark.label for mark in store.marks(0)[:3]] == ["In[0]", "In[1]", "In[2]"]
    assert len(store.marks(0)) == 3 + EPOCHS
    for number in range(10 * CELLS):
        store.begin_cell(NOW + 9000 + number, number, "x" * 10_000, None)
    assert len(cells(store)) == CELLS + 1
    assert len(cells(store)[-1].cell_id.encode()) <= 64


def test_a_failed_request_is_a_mark_of_its_own() -> None:
    store = MarkStore()
    store.begin_cell(NOW, 4, "", None)
    store.fail_request(NOW + 1, 4, GPU, 6 * GiB)
    store.end_cell(NOW + 2, None)

    cell, request = store.marks(0)
    assert (request.kind, request.label, request.t, request.cell) == ("request", "6 GiB asked", NOW + 1, 4)
    assert (request.device, request.nbytes, cell.end) == (GPU, 6 * GiB, NOW + 2)


def test_a_tick_has_the_newest_marks_and_a_span_those_that_reach_into_it() -> None:
    store = MarkStore()
    for number in range(20):
        store.begin_cell(NOW + 10 * number, number, "", None)
        store.end_cell(NOW + 10 * number + 5, None)
    store.begin_cell(NOW + 200, 20, "", None)
    store.follow_epoch(NOW + 201, 1, is_fitting=True)

    assert [mark.label for mark in store.newest(4)] == ["In[18]", "In[19]", "In[20]", "epoch 1"]
    assert [mark.label for mark in store.marks(NOW + 184)] == ["In[18]", "In[19]", "In[20]", "epoch 1"]


def test_a_tick_has_the_last_run_of_the_cell_that_runs_however_long_ago_that_was() -> None:
    store = MarkStore()
    for number, cell_id in enumerate(["fit", "fit", *map(str, range(20)), ""]):
        store.begin_cell(NOW + 10 * number, number, cell_id, counters(number, number))
        store.end_cell(NOW + 10 * number + 5, counters(number, number))
    assert [mark.label for mark in store.newest(2)] == ["In[21]", "In[22]"]
    store.begin_cell(NOW + 300, 23, "fit", None)
    assert [mark.label for mark in store.newest(2)] == ["In[1]", "In[22]", "In[23]"]
    assert store.newest(2)[0].peaks == (DevicePeak(GPU, 1, is_exact=False),)
    assert [mark.label for mark in store.newest(40)].count("In[1]") == 1
    store.end_cell(NOW + 301, None)
    store.begin_cell(NOW + 302, 24, "", None)  # no cell of a notebook: none is its last run
    assert [mark.label for mark in store.newest(2)] == ["In[23]", "In[24]"]
