"""The trace of a fit: events as Chrome's format has them, nested, end to end, and in all as long as the recording."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.training.profiler.analysis.report import MemoryPoint
from nbguard.training.profiler.analysis.time import gpu
from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.gpu import trace_events
from nbguard.training.profiler.analysis.time.phase_log import PhaseLog
from nbguard.training.profiler.record.recorder import Recorder

US = 1000


def _recorder() -> Recorder:
    """Return a recorder whose clock goes on by a microsecond whenever it is read."""
    return Recorder(clock=itertools.count(10**15, US).__next__)


def _spans(found: dict[str, Any], track: str) -> list[dict[str, Any]]:
    named = {event["args"]["name"]: event["tid"] for event in found["traceEvents"] if event["name"] == "thread_name"}
    return [event for event in found["traceEvents"] if event["ph"] == "X" and event["tid"] == named[track]]


def _start(event: dict[str, Any]) -> int:
    """Return nanoseconds, as who reads the format takes microseconds with three decimals."""
    return round(event["ts"] * US)


def _end(event: dict[str, Any]) -> int:
    return _start(event) + round(event["dur"] * US)


def _check(found: dict[str, Any]) -> None:
    """Check what the format asks for: known kinds, their fields, each track in order and its events nested or apart."""
    needed = {"M": {"args"}, "X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "i": {"ts", "s", "tid"}}
    json.loads(json.dumps(found, allow_nan=False))
    assert found["displayTimeUnit"] == "ms"
    for event in found["traceEvents"]:
        assert needed[event["ph"]] | {"name", "pid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "C" or all(type(value) is int for value in event["args"].values())
    for track in ("phases", "batches"):
        spans = _spans(found, track)
        open_: list[dict[str, Any]] = []
        for before, event in zip([None, *spans], spans, strict=False):
            assert event["dur"] >= 0
            assert before is None or _start(before) <= _start(event)
            while open_ and _end(open_[-1]) <= _start(event):
                open_.pop()
            assert not open_ or _end(event) <= _end(open_[-1])
            open_.append(event)


def _phase(recorder: Recorder, name: str) -> None:
    recorder.mark(recorder.current)
    recorder.mark(recorder.code(name))


def _epoch(recorder: Recorder, loop: int, batches: int, *, steps: bool = True) -> None:
    for _ in range(batches):
        recorder.boundary("batch", loop)
        _phase(recorder, phases.WAIT)
        _phase(recorder, phases.FORWARD)
        if steps:
            recorder.boundary("step")
    recorder.boundary("batch", loop)
    recorder.boundary("end", loop)


def test_phases_are_end_to_end_and_as_long_as_the_recording() -> None:
    recorder = _recorder()
    _epoch(recorder, 1, 3)
    marks = recorder.stop()

    found = trace_events(marks, title="a fit")

    _check(found)
    spans = _spans(found, "phases")
    assert all(_end(before) == _start(after) for before, after in itertools.pairwise(spans))
    assert all(before["name"] != after["name"] for before, after in itertools.pairwise(spans))
    assert (_start(spans[0]), _end(spans[-1])) == (0, marks.wall)
    assert sum(_end(event) - _start(event) for event in spans if event["name"] == phases.FORWARD) == sum(
        time - before
        for before, time, code in zip([marks.start, *marks.times], marks.times, marks.codes, strict=False)
        if marks.labels[code] == phases.FORWARD
    )
    assert any(event["args"] == {"name": "a fit"} for event in found["traceEvents"] if event["name"] == "process_name")


def test_batches_are_inside_their_pass_and_the_asking_for_one_more_is_none() -> None:
    recorder = _recorder()
    _epoch(recorder, 1, 3)
    _epoch(recorder, 2, 2, steps=False)

    spans = _spans(trace_events(recorder.stop()), "batches")

    assert [event["name"] for event in spans] == [
        *("loop 1", "batch 1", "batch 2", "batch 3"),
        *("loop 2", "batch 1", "batch 2"),
    ]
    assert [event["args"].get("optimizer steps", 0) for event in spans] == [0, 1, 1, 1, 0, 0, 0]
    assert spans[0]["args"] == {"batches": 3}
    assert _end(spans[0]) <= _start(spans[4])


def test_a_loop_inside_a_batch_of_another_is_nested_there() -> None:
    recorder = _recorder()
    recorder.boundary("batch", 1)
    _epoch(recorder, 2, 2)
    recorder.boundary("disturbed")
    recorder.boundary("batch", 1)
    recorder.boundary("end", 1)

    found = trace_events(recorder.stop())

    _check(found)
    outer, batch, inner = _spans(found, "batches")[:3]
    assert (outer["name"], batch["name"], inner["name"]) == ("loop 1", "batch 1", "loop 2")
    assert _end(inner) < _end(batch) <= _end(outer)
    assert "nbguard looked" in batch["args"]["disturbed"]


def test_loops_that_were_left_are_not_nested_in_one_another() -> None:
    recorder = _recorder()
    for loop in range(1, 101):
        recorder.boundary("batch", loop)
        recorder.boundary("batch", loop)

    found = trace_events(recorder.stop())

    _check(found)
    loops = [event for event in _spans(found, "batches") if event["name"].startswith("loop")]
    assert all(_end(before) <= _start(after) for before, after in itertools.pairwise(loops))
    assert [event["args"]["batches"] for event in loops] == [2] * 100


def test_of_two_loops_in_turn_the_second_is_inside_the_batches_of_the_first() -> None:
    recorder = _recorder()
    for _ in range(5):
        recorder.boundary("batch", 1)
        recorder.boundary("batch", 2)

    found = trace_events(recorder.stop())

    _check(found)
    loops = [event for event in _spans(found, "batches") if event["name"].startswith("loop")]
    assert [event["name"] for event in loops] == ["loop 1", *["loop 2"] * 5]
    assert loops[0]["args"] == {"batches": 5}


_Turns = st.lists(st.tuples(st.sampled_from(["batch", "batch", "batch", "end", "step", "fit", "disturbed"]), st.integers(1, 4)))


@given(_Turns, st.lists(st.integers(0, 5), max_size=5), st.integers(0, 30))
def test_whatever_the_loops_do_the_events_are_nested_and_add_up(boundaries: list[Any], codes: list[int], most: int) -> None:
    recorder = _recorder()
    for kind, loop in boundaries:
        for code in codes:
            recorder.mark(code)
        recorder.boundary(kind, loop)
    marks = recorder.stop()

    found = trace_events(marks)

    _check(found)
    assert sum(_end(event) - _start(event) for event in _spans(found, "phases")) == marks.wall
    assert all(_end(event) <= marks.wall for event in _spans(found, "batches"))


def _points(count: int) -> Sequence[MemoryPoint]:
    return [
        MemoryPoint(
            at=number * US, phase=phases.FORWARD, batch=1, allocated=2**20 * number, reserved=None if number < 2 else 2**30
        )
        for number in range(count)
    ]


def test_memory_is_a_graph_of_what_is_allocated_and_one_of_what_is_reserved() -> None:
    recorder = _recorder()
    _epoch(recorder, 1, 3)

    found = trace_events(recorder.stop(), _points(4))

    _check(found)
    counters = [event for event in found["traceEvents"] if event["ph"] == "C"]
    assert [(event["name"], event["ts"], event["args"]["bytes"]) for event in counters] == [
        *(("allocated (bytes)", float(number), 2**20 * number) for number in range(4)),
        *(("reserved (bytes)", float(number), 2**30) for number in (2, 3)),
    ]


def test_a_very_long_log_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_MARKS", 10)
    recorder = _recorder()
    _epoch(recorder, 1, 5)
    marks = recorder.stop()

    found = trace_events(marks, _points(100))

    _check(found)
    assert found["otherData"]["note"].startswith(f"cut: the first 10 of {len(marks.times)} marks")
    cut = marks.times[9] - marks.start
    assert _end(_spans(found, "phases")[-1]) == cut
    assert max(_end(event) for event in _spans(found, "batches")) == cut
    assert max(_start(event) for event in found["traceEvents"] if event["ph"] == "C") <= cut


def test_nothing_recorded_is_an_empty_trace() -> None:
    found = trace_events(PhaseLog(start=5, codes=(), times=(), labels=()))

    _check(found)
    assert {event["ph"] for event in found["traceEvents"]} == {"M"}


def test_a_real_loop_over_torch() -> None:
    """Two epochs of a real loader, a validation between them, a model that learns."""
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    from nbguard.training.profiler.record.torch_loop import TorchLoop

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.ones(12, 4), torch.ones(12, 1)), batch_size=4)
    recorder = Recorder()
    loop = TorchLoop(recorder)
    loop.start()
    try:
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.MSELoss()(model(x), y).backward()
                optimizer.step()
            for x, _ in loader:
                model(x)
    finally:
        loop.stop()
    marks = recorder.stop()

    found = trace_events(marks)

    _check(found)
    spans = _spans(found, "batches")
    assert [event["args"]["batches"] for event in spans if event["name"].startswith("loop")] == [3, 3, 3, 3]
    assert sum(event["args"].get("optimizer steps", 0) for event in spans) == 6
    names = {event["name"] for event in _spans(found, "phases")}
    assert {phases.WAIT, phases.FORWARD, phases.LOSS, phases.BACKWARD, phases.STEP, phases.ZERO_GRAD} <= names
    assert sum(_end(event) - _start(event) for event in _spans(found, "phases")) == marks.wall
