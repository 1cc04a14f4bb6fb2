"""Ticks: small, whole, and their line on the time axis."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from nbguard.frontend.sidebar.memory_line import AllocatorPeak, MarkStore, MemoryLine
from nbguard.frontend.sidebar.protocol.state import FitTick, JobStatus, LinePoint, Tick, TimeMark
from nbguard.frontend.sidebar.protocol.ticks import LastLook, build_tick, device_readings, line_points
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import AllocatorStats, Counted, DeviceFacts, NvmlFacts, ProcessFact, TickReading
from nbguard.memory.core.processes import Identity
from nbguard.memory.core.requests import Room
from nbguard.memory.reports.report import build_report
from nbguard.units import GiB, MiB
from tests.sidebar.protocol.scenes import NOW, PID, SCENES, counted, scene

USUAL = 4000


def _bytes(tick: Tick) -> int:
    return len(json.dumps(asdict(tick)).encode())


def _tick(
    reading: TickReading, *, marks: tuple[TimeMark, ...] = (), look: LastLook | None = None, survived: tuple[str, ...] = ()
) -> Tick:
    devices = device_readings(reading)
    return build_tick(
        "b00t",
        1,
        NOW,
        reading,
        devices=devices,
        points=line_points(NOW, reading, devices),
        look=look or LastLook(heap=7, cell=14),
        busy=True,
        cell=15,
        survived=survived,
        marks=marks,
    )


@pytest.mark.parametrize("name", sorted(SCENES.keys() - {"cpu", "hostile"}))
def test_counters_alone_tell_the_same_parts_as_a_look(name: str) -> None:
    facts = SCENES[name]().facts
    tick = _tick(TickReading(tracked="cuda", devices=(counted(facts.devices[0]),), pid=PID))

    (device,), (true,) = tick.devices, build_report(Analysis(facts)).devices
    assert device.parts == true.parts
    assert sum(part.nbytes for part in device.parts) == device.total


def test_a_tick_is_small() -> None:
    facts = SCENES["training"]().facts
    device = counted(facts.devices[0])
    marks = MarkStore()
    for n in range(40):
        marks.begin_cell(
            NOW - 80 + n, n, "5f3c2a1e-1111-2222-3333-444444444444", {"cuda:0": AllocatorPeak(allocated=n, peak=n)}
        )
    tick = replace(
        _tick(TickReading(tracked="cuda", devices=(device,), pid=PID), marks=marks.newest(5)),
        fit=scene("training")[0].fit,
        jobs=(JobStatus("r", "Clean", "queued"),),
    )

    assert [mark.label for mark in tick.marks] == ["In[35]", "In[36]", "In[37]", "In[38]", "In[39]"]
    assert _bytes(tick) < USUAL


def test_a_tick_of_eight_devices_of_which_one_is_used_is_small() -> None:
    device = counted(SCENES["training"]().facts.devices[0])
    nothing = AllocatorStats(allocated=0, reserved=0, peak_allocated=0, peak_reserved=0, active=0, inactive_split=0)
    unused = replace(device, allocator=nothing, nvml=NvmlFacts(80 * GiB, 0, ()), free=80 * GiB, has_context=False)
    devices = (device, *(replace(unused, device=f"cuda:{n}") for n in range(1, 8)))
    tick = _tick(TickReading(tracked="cuda", devices=devices, pid=PID))

    assert _bytes(tick) < USUAL
    assert tick.devices[0].line is not None
    assert not any(each.line for each in tick.devices[1:])


def test_a_tick_of_eight_devices_in_use_is_bounded() -> None:
    device = counted(SCENES["training"]().facts.devices[0])
    devices = tuple(replace(device, device=f"cuda:{n}") for n in range(8))
    tick = _tick(TickReading(tracked="cuda", devices=devices, pid=PID))

    assert all(each.line for each in tick.devices)
    assert _bytes(tick) < 2 * USUAL
    notes = {part.name: part.note for part in tick.devices[0].parts}
    assert (notes["releasable"], notes["others"]) == ("", "1 other process")


def test_other_notebooks_are_named_by_the_driver_s_list_and_nobody_is_guessed_at() -> None:
    mine, theirs = Identity(notebook="/a/mine.ipynb", is_own=True, kernel="k1"), Identity(notebook="/a/b.ipynb", kernel="k2")
    known = (ProcessFact(2, GiB, mine), ProcessFact(3, 2 * GiB, replace(theirs, kernel="")), ProcessFact(4, 3 * GiB, theirs))
    nvml = NvmlFacts(80 * GiB, 9 * GiB, (ProcessFact(PID, GiB), *known, ProcessFact(5, None), ProcessFact(6, 4 * GiB)))
    device = replace(counted(SCENES["training"]().facts.devices[0]), nvml=nvml)
    tick = _tick(TickReading(tracked="cuda", devices=(device,), pid=PID))

    assert tick.neighbours == (
        ("cuda:0", "k2", "b.ipynb", 5 * GiB),
        ("cuda:0", "", "", 4 * GiB),
        ("cuda:0", "", "this notebook's own processes", GiB),
        ("cuda:0", "", "", None),
    )
    of_a_host = replace(device, nvml=replace(nvml, processes=known))  # in a container, none of the pids is known to be ours
    assert _tick(TickReading(tracked="cuda", devices=(of_a_host,), pid=PID)).neighbours == ()


def test_bounds_are_said_of_many_devices_too() -> None:
    device = replace(counted(SCENES["training"]().facts.devices[0]), settings="expandable_segments:True")
    (one,), (many, *_) = (_tick(TickReading(tracked="cuda", devices=(device,) * n, pid=PID)).devices for n in (1, 3))

    assert {p.name: p.note for p in one.parts}["stranded"] == "at least; free, but between live blocks"
    assert {p.name: p.note for p in many.parts}["stranded"] == "at least"


def test_a_device_that_does_not_tell_apart_has_its_cache_in_one() -> None:
    device = DeviceFacts(device="mps:0", name="Apple GPU", allocator=AllocatorStats(allocated=5 * MiB, reserved=8 * MiB))
    (tick,) = _tick(TickReading(tracked="mps", devices=(device,), pid=PID)).devices

    assert [(part.name, part.nbytes) for part in tick.parts] == [("allocated", 5 * MiB), ("cached", 3 * MiB)]


def test_without_a_gpu_the_process_is_told_and_how_it_was_measured() -> None:
    reading = TickReading(
        tracked="cpu", devices=(DeviceFacts(device="cpu", name="host memory"),), pid=PID, process=3 * GiB, source="malloc"
    )
    (tick,) = _tick(reading).devices

    assert [(part.name, part.nbytes) for part in tick.parts] == [("process", 3 * GiB)]
    assert tick.parts[0].note == "tensors and everything else in this process (in use by malloc)"
    assert (tick.total, tick.peak) == (None, None)
    assert reading.in_use == {"cpu": 3 * GiB}


def test_before_pytorch_is_imported_there_is_nothing() -> None:
    tick = _tick(TickReading())

    assert (tick.tracked, tick.devices) == ("", ())


def test_a_reading_is_a_point_of_the_line_with_all_that_a_table_of_it_needs() -> None:
    device = counted(SCENES["training"]().facts.devices[0])
    (tick,) = _tick(TickReading(tracked="cuda", devices=(device,), pid=PID)).devices
    parts = {part.name: part.nbytes for part in tick.parts}

    assert tick.line is not None
    assert device.allocator is not None
    assert tick.line[4:] == (parts["allocated"], device.allocator.reserved, parts["others"], parts["free"])
    assert tick.line.low == tick.line.high == parts["allocated"]
    assert tick.line.since == tick.line.until == NOW


def _looked_at(free: int) -> tuple[LastLook, TickReading]:
    device = SCENES["training"]().facts.devices[0]
    room = Room(device=device)
    counts = (Counted(device="cuda:0", allocated=1, reserved=2, peak=3, allocations=4),)
    look = LastLook(heap=7, cell=14, counted=counts, limits={"cuda:0": room.limits()})
    return look, TickReading(tracked="cuda", devices=(replace(counted(device), free=free),), pid=PID, counted=counts)


@pytest.mark.parametrize("free", [0, 5 * MiB, 300 * MiB, 40 * GiB])
def test_what_fits_now_is_said_by_todays_free_bytes_as_the_rule_has_it(free: int) -> None:
    """Another kernel takes memory, this one is idle: the segments are as they were, what is free is not."""
    look, reading = _looked_at(free)
    (tick,) = _tick(reading, look=look).devices

    true = Room(device=replace(SCENES["training"]().facts.devices[0], free=free)).largest()
    assert tick.fits == (true.now, true.flushed)


def test_what_fits_is_not_said_of_blocks_that_have_changed_since_they_were_looked_at() -> None:
    look, reading = _looked_at(40 * GiB)
    changed = replace(reading, counted=(replace(reading.counted[0], allocations=5),))
    unknown = replace(reading, devices=(replace(reading.devices[0], free=None),))

    assert [_tick(each, look=look).devices[0].fits for each in (changed, unknown)] == [None, None]
    assert (_tick(reading, look=look).heap, _tick(reading, look=look).heap_cell) == (7, 14)


def test_a_sentence_on_a_training_that_went_on_is_short_enough() -> None:
    sentences = ("batch 7: out of memory; same weights", "x" * 10_000)
    whole, cut = _tick(TickReading(), survived=sentences).survived
    assert whole == sentences[0]
    assert len(cut.encode()) <= 400


def _lined(readings: list[tuple[int, int]]) -> tuple[MemoryLine, list[LinePoint]]:
    """Return the line of these (allocated, peak counter), and its points as ticks have them."""
    line, points, device = MemoryLine(), [], counted(SCENES["idle"]().facts.devices[0])
    for second, (allocated, peak) in enumerate(readings):
        stats = replace(device.allocator, allocated=allocated, peak_allocated=peak)  # type: ignore[type-var]
        reading = TickReading(tracked="cuda", devices=(replace(device, allocator=stats),), pid=PID)
        made = line_points(NOW + second, reading, device_readings(reading))
        points.append(line.add(NOW + second, made, reading)["cuda:0"])
    return line, points


def test_a_spike_between_two_readings_is_in_the_line() -> None:
    line, points = _lined([(5 * GiB, 6 * GiB), (5 * GiB, 6 * GiB), (2 * GiB, 7 * GiB), (2 * GiB, 7 * GiB), (2 * GiB, 3 * GiB)])

    assert [point.high // GiB for point in points] == [
        5,
        5,
        7,
        2,
        2,
    ]  # neither an old peak nor a reset counter
    ((_, kept),) = ((each.device, each.points) for each in line.history(0, 5).lines)
    assert [(point.low // GiB, point.high // GiB, point.allocated // GiB) for point in kept] == [
        (5, 5, 5),
        (2, 7, 2),
        (2, 2, 2),
    ]


def test_the_history_of_a_span_is_small_whatever_happened() -> None:
    line, device = MemoryLine(), counted(SCENES["training"]().facts.devices[0])
    devices = tuple(replace(device, device=f"cuda:{n}") for n in range(8))
    for second in range(5000):
        if second % 20 == 0:
            line.begin_cell(NOW + second, second // 20, "5f3c2a1e-1111-2222-3333-444444444444", None)
            line.follow(NOW + second, FitTick(label="learn", call="fit", epoch=second))
        stats = replace(device.allocator, allocated=GiB + second * 7919 % 1000 * MiB)  # type: ignore[type-var]
        used = devices if second % 2 else devices[:1]
        reading = TickReading(tracked="cuda", devices=tuple(replace(each, allocator=stats) for each in used), pid=PID)
        line.add(NOW + second, line_points(NOW + second, reading, device_readings(reading)), reading)

    for seconds in (60, 600, 0):
        history = line.history(seconds, 1)
        assert len(json.dumps(asdict(history)).encode()) < 100_000
        assert sum(len(each.points) for each in history.lines) <= 8 * 41
        assert len(history.marks) <= 120 + 60
    cells = [mark.label for mark in history.marks if mark.kind == "cell"]
    assert (len(cells), cells[-1]) == (120, "In[249]")


def test_a_device_that_is_used_for_the_first_time_had_nothing_before() -> None:
    line, device = MemoryLine(), counted(SCENES["idle"]().facts.devices[0])
    stats = replace(device.allocator, allocated=GiB, peak_allocated=3 * GiB)  # type: ignore[type-var]
    for second, devices in enumerate(((replace(device, allocator=None),), (replace(device, allocator=stats),))):
        reading = TickReading(tracked="cuda", devices=devices, pid=PID)
        line.add(NOW + second, line_points(NOW + second, reading, device_readings(reading)), reading)

    before, first = line.history(0, 2).lines[0].points
    assert (before.since, before.allocated, before.high) == (NOW, 0, 0)
    assert (first.since, first.allocated, first.high) == (NOW + 1, GiB, 3 * GiB)
