"""The log of a fit as a trace that Perfetto and Chrome's about:tracing open, with phases, batches and the memory over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nbguard.training.profiler.analysis.operators import OperatorSpan
from nbguard.training.profiler.analysis.report import MemoryPoint
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, PhaseLog

MOST_MARKS = 400_000
"""Marks that are written, the first ones: more makes a file that a browser does not open."""
_PROCESS = 1
_PHASES, _BATCHES, _OPERATORS = 1, 2, 3
"""The tracks, as the format numbers threads."""

_Event = dict[str, Any]


def trace_events(
    marks: PhaseLog, points: Sequence[MemoryPoint] = (), title: str = "", operators: Sequence[OperatorSpan] = ()
) -> dict[str, Any]:
    """Return a trace in the format that is JSON for Chrome: times in microseconds from the start of the recording.

    Phases are one track, end to end; passes over loaders and their batches, nested as the loops are, another. Calls of
    operators, where `--ops` had them recorded, are a third.
    """
    kept = min(len(marks.times), MOST_MARKS)
    end = marks.times[kept - 1] - marks.start if kept else 0
    events = [
        *_names(title, has_operators=bool(operators)),
        *_phases(marks, kept),
        *sorted(_loops(marks, kept, end), key=lambda event: (event["ts"], -event.get("dur", 0))),
        *(_span(_OPERATORS, each.name, each.start, each.start + each.duration) for each in operators if each.start <= end),
        *_memory([point for point in points if point.at <= end]),
    ]
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if kept < len(marks.times):
        share = 100 * end / marks.wall
        trace["otherData"] = {"note": f"cut: the first {kept:,} of {len(marks.times):,} marks, {share:.1f} % of the time"}
    return trace


def _names(title: str, *, has_operators: bool) -> Iterator[_Event]:
    yield {"ph": "M", "pid": _PROCESS, "tid": _PHASES, "name": "process_name", "args": {"name": title or "fit"}}
    for track, name in ((_PHASES, "phases"), (_BATCHES, "batches"), (_OPERATORS, "operators"))[: 2 + has_operators]:
        yield {"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _span(track: int, name: str, start: int, end: int, args: dict[str, Any] | None = None) -> _Event:
    """Return the span from `start` to `end`, in nanoseconds."""
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "pid": _PROCESS, "tid": track, "name": name, "cat": "fit", **times, **({"args": args} if args else {})}


def _phases(marks: PhaseLog, kept: int) -> Iterator[_Event]:
    """Yield the phases, each run of marks of the same one as one event."""
    start = marks.start
    for number in range(kept):
        if number + 1 == kept or marks.codes[number + 1] != marks.codes[number]:
            if marks.times[number] > start:
                yield _span(_PHASES, marks.labels[marks.codes[number]], start - marks.start, marks.times[number] - marks.start)
            start = marks.times[number]


class _Loop:
    """A pass over a loader that goes on, and the batch that it is in."""

    def __init__(self, number: int, start: int) -> None:
        self.number = number
        self._start = self._batch_start = start
        self._batches = 1
        self._notes: dict[str, Any] = {}

    def note(self, kind: BoundaryKind) -> None:
        """Keep that an optimizer has stepped, or that nbguard has disturbed the batch."""
        if kind == "step":
            self._notes["optimizer steps"] = self._notes.get("optimizer steps", 0) + 1
        else:
            self._notes["disturbed"] = "nbguard looked closer in it: its times tell nothing of the fit"

    def next_batch(self, at: int) -> _Event:
        """Return the batch that is over, and begin the next."""
        over = self._batch(at)
        self._batches, self._batch_start, self._notes = self._batches + 1, at, {}
        return over

    def end(self, at: int, *, is_complete: bool) -> Iterator[_Event]:
        """Yield the pass; unless it is complete, the batch too where it was left. In a complete one there was no more."""
        yield _span(_BATCHES, f"loop {self.number}", self._start, at, {"batches": self._batches - is_complete})
        if not is_complete:
            yield self._batch(at)

    def _batch(self, at: int) -> _Event:
        return _span(_BATCHES, f"batch {self._batches}", self._batch_start, at, {"loop": self.number, **self._notes})


def _loops(marks: PhaseLog, kept: int, end: int) -> Iterator[_Event]:
    """Yield passes over loaders and their batches. One inside another's batch, or left for good, ends before that goes on."""
    last = {boundary.loop: place for place, boundary in enumerate(marks.boundaries) if boundary.kind in ("batch", "end")}
    within: list[_Loop] = []  # outermost first
    for place, boundary in enumerate(marks.boundaries):
        if boundary.at > kept:
            break
        at = (marks.times[boundary.at - 1] if boundary.at else marks.start) - marks.start
        if boundary.kind == "fit":
            yield {"ph": "i", "s": "p", "pid": _PROCESS, "tid": _BATCHES, "name": f"fit {boundary.loop}", "ts": at / 1000}
        elif boundary.kind in ("batch", "end"):
            is_known = any(loop.number == boundary.loop for loop in within)
            while within and within[-1].number != boundary.loop and (is_known or last[within[-1].number] < place):
                yield from within.pop().end(at, is_complete=False)
            yield from _bounded(within, boundary, at)
        elif within:
            within[-1].note(boundary.kind)
    for loop in reversed(within):
        yield from loop.end(end, is_complete=False)


def _bounded(within: list[_Loop], boundary: Boundary, at: int) -> Iterator[_Event]:
    """Yield the spans that end at a boundary of the innermost of the loops `within`, or of one that begins."""
    if not within or within[-1].number != boundary.loop:
        within += [_Loop(boundary.loop, at)] if boundary.kind == "batch" else []
    elif boundary.kind == "batch":
        yield within[-1].next_batch(at)
    else:
        yield from within.pop().end(at, is_complete=True)


def _memory(points: Sequence[MemoryPoint]) -> Iterator[_Event]:
    """Yield the counters as graphs, one for each counter: allocated memory is part of reserved memory, and not beside it."""
    for name in ("allocated", "reserved"):
        for point in points:
            nbytes = getattr(point, name)
            if nbytes is not None:
                yield {"ph": "C", "pid": _PROCESS, "name": f"{name} (bytes)", "ts": point.at / 1000, "args": {"bytes": nbytes}}
