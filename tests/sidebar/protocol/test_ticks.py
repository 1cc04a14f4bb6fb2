"""Ticks: small, whole, and their line on the time axis."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from nbguard.memory.analysis import Analysis
from nbguard.memory.counters import TickReading
from nbguard.memory.facts import AllocatorStats, DeviceFacts, NvmlFacts
from nbguard.reports.report import build_report
from nbguard.sidebar.protocol.sparkline import MARKS, POINTS, WINDOW, Sparkline
from nbguard.sidebar.protocol.state import JobStatus, Tick
from nbguard.sidebar.protocol.ticks import build_tick
from nbguard.units import GiB, MiB
from tests.sidebar.protocol.scenes import NOW, PID, SCENES, counted, scene

USUAL = 4000
NEARLY_ALL = POINTS - 6


def _bytes(tick: Tick) -> int:
    return len(json.dumps(asdict(tick)).encode())


def _history(names: list[str], seconds: float = 900, rate: float = 4.0) -> Sparkline:
    """Fifteen minutes at 4 Hz."""
    sparks = Sparkline()
    for n in range(int(seconds * rate)):
        t = NOW - seconds + (n + 1) / rate
        sparks.add(t, dict.fromkeys(names, 10 * GiB + (n * 7919 % 1000) * MiB))
    return sparks


def _tick(reading: TickReading, sparks: Sparkline) -> Tick:
    return build_tick("b00t", 1, NOW, 7, reading, sparks, busy=True, cell=15)


@pytest.mark.parametrize("name", sorted(SCENES.keys() - {"cpu", "hostile"}))
def test_counters_alone_tell_the_same_parts_as_a_look(name: str) -> None:
    facts = SCENES[name]().facts
    tick = _tick(TickReading(tracked="cuda", devices=(counted(facts.devices[0]),), pid=PID), Sparkline())

    (device,), (true,) = tick.devices, build_report(Analysis(facts)).devices
    assert device.parts == true.parts
    assert sum(part.nbytes for part in device.parts) == device.total


def test_a_tick_is_small() -> None:
    facts = SCENES["training"]().facts
    device = counted(facts.devices[0])
    sparks = _history(["cuda:0"])
    for n in range(40):
        sparks.mark(NOW - 80 + n, f"In[{n}]")
    tick = replace(
        _tick(TickReading(tracked="cuda", devices=(device,), pid=PID), sparks),
        fit=scene("training")[0].fit,
        jobs=(JobStatus("r", "Clean", "queued"),),
    )

    assert NEARLY_ALL <= len(tick.devices[0].spark) <= POINTS
    assert _bytes(tick) < USUAL


def test_a_tick_of_eight_devices_of_which_one_is_used_is_small() -> None:
    device = counted(SCENES["training"]().facts.devices[0])
    nothing = AllocatorStats(allocated=0, reserved=0, peak_allocated=0, peak_reserved=0, active=0, inactive_split=0)
    unused = replace(device, allocator=nothing, nvml=NvmlFacts(80 * GiB, 0, ()), free=80 * GiB, has_context=False)
    devices = (device, *(replace(unused, device=f"cuda:{n}") for n in range(1, 8)))
    tick = _tick(TickReading(tracked="cuda", devices=devices, pid=PID), _history(["cuda:0"]))

    assert _bytes(tick) < USUAL
    assert NEARLY_ALL <= len(tick.devices[0].spark) <= POINTS
    assert not any(each.spark for each in tick.devices[1:])


def test_a_tick_of_eight_devices_in_use_is_bounded() -> None:
    device = counted(SCENES["training"]().facts.devices[0])
    devices = tuple(replace(device, device=f"cuda:{n}") for n in range(8))
    tick = _tick(TickReading(tracked="cuda", devices=devices, pid=PID), _history([each.device for each in devices]))

    assert sum(len(each.spark) for each in tick.devices) <= POINTS
    assert _bytes(tick) < 2 * USUAL
    notes = {part.name: part.note for part in tick.devices[0].parts}
    assert (notes["releasable"], notes["others"]) == ("", "1 other process")


def test_bounds_are_said_of_many_devices_too() -> None:
    device = replace(counted(SCENES["training"]().facts.devices[0]), settings="expandable_segments:True")
    (one,), (many, *_) = (
        _tick(TickReading(tracked="cuda", devices=(device,) * n, pid=PID), Sparkline()).devices for n in (1, 3)
    )

    assert {p.name: p.note for p in one.parts}["stranded"] == "at least; free, but between live blocks"
    assert {p.name: p.note for p in many.parts}["stranded"] == "at least"


def test_a_device_that_does_not_tell_apart_has_its_cache_in_one() -> None:
    device = DeviceFacts(device="mps:0", name="Apple GPU", allocator=AllocatorStats(allocated=5 * MiB, reserved=8 * MiB))
    (tick,) = _tick(TickReading(tracked="mps", devices=(device,), pid=PID), Sparkline()).devices

    assert [(part.name, part.nbytes) for part in tick.parts] == [("allocated", 5 * MiB), ("cached", 3 * MiB)]


def test_without_a_gpu_the_process_is_told_and_how_it_was_measured() -> None:
    reading = TickReading(
        tracked="cpu", devices=(DeviceFacts(device="cpu", name="host memory"),), pid=PID, process=3 * GiB, source="malloc"
    )
    (tick,) = _tick(reading, Sparkline()).devices

    assert [(part.name, part.nbytes) for part in tick.parts] == [("process", 3 * GiB)]
    assert tick.parts[0].note == "tensors and everything else in this process (in use by malloc)"
    assert (tick.total, tick.peak) == (None, None)
    assert reading.in_use == {"cpu": 3 * GiB}


def test_before_pytorch_is_imported_there_is_nothing() -> None:
    tick = _tick(TickReading(), Sparkline())

    assert (tick.tracked, tick.devices) == ("", ())


def test_the_line_keeps_its_peaks_and_its_window_and_ends_now() -> None:
    sparks = Sparkline()
    for n in range(4 * 600):
        t = NOW - 600 + n / 4
        sparks.add(t, {"cuda:0": 77 if t == NOW - 200.25 else 50 if t < NOW - 1 else 11})
    line = sparks.points("cuda:0")

    assert len(line) <= POINTS
    assert [t for t, _ in line] == sorted(t for t, _ in line)
    assert line[-1] == (NOW - 0.2, 11)
    assert line[0][0] >= NOW - WINDOW - 1
    assert max(line, key=lambda point: point[1]) == (pytest.approx(NOW - 200.25, abs=0.1), 77)
    assert all(later - earlier < 2.1 * WINDOW / (POINTS // 2) for (earlier, _), (later, _) in pairwise(line))


def test_a_line_that_is_asked_for_at_each_tick_is_the_same() -> None:
    asked, once = Sparkline(), Sparkline()
    for n in range(4 * 400):
        for sparks in (asked, once):
            sparks.add(NOW - 400 + n / 4, {"cuda:0": n * 7919 % 1000})
        line = asked.points("cuda:0")

    assert line[2:] == once.points("cuda:0")[-len(line) :][2:]  # the oldest stretch goes once a second


@pytest.mark.parametrize("since", range(30, 290, 17))
def test_the_highest_point_is_kept_however_old(since: int) -> None:
    sparks = Sparkline()
    for n in range(4 * 600):
        t = NOW - 600 + n / 4
        sparks.add(t, {"cuda:0": 77 if t == NOW - since else 50})

    assert (NOW - since, 77) in sparks.points("cuda:0")


def test_old_points_stand_still_while_time_goes_on() -> None:
    """A line whose old points moved from tick to tick would flicker."""
    sparks = _history(["cuda:0"])
    before = set(sparks.points("cuda:0")[5:20])
    sparks.add(NOW + 0.25, {"cuda:0": 5})

    assert before <= set(sparks.points("cuda:0"))


def test_a_device_that_is_gone_leaves_its_share_to_the_others() -> None:
    sparks = _history(["cuda:0", "cuda:1"])
    assert NEARLY_ALL // 2 <= len(sparks.points("cuda:0")) <= POINTS // 2
    for n in range(700):
        sparks.add(NOW + 1 + n, {"cuda:0": 5})

    assert NEARLY_ALL <= len(sparks.points("cuda:0")) <= POINTS
    assert sparks.points("cuda:1") == ()


def test_marks_are_few_and_of_the_window() -> None:
    sparks = Sparkline()
    for n in range(30):
        sparks.mark(NOW - 600 + 20 * n, f"In[{n}]" if n < 29 else "x" * 10_000)

    marks = sparks.marks(NOW)
    assert len(marks) == MARKS
    assert marks[0].label == "In[18]"
    assert len(marks[-1].label) <= 60
    assert sparks.marks(NOW + 200)[0].t >= NOW - 100
