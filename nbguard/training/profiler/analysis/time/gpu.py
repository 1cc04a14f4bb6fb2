"""The work of a GPU in a fit, from events in its stream, with the times of recording each and of its completion on the GPU.

An event that the GPU comes to at once has found it with nothing left to do. The delay of any other event is how far the GPU is
behind the program. The two clocks are set against each other by the events that took least.

On an H100 the share of time with running kernels, by CUPTI, lay between the busy share here, and that with `paced` added:
tests/data/profile/gpu_marks.json.gz has the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from nbguard.training.profiler.analysis.operators import OperatorSpan
from nbguard.training.profiler.analysis.report import MemoryPoint
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, PhaseLog
from nbguard.units import counted

# --- The log of a fit as a trace that Perfetto and Chrome's about:tracing open, with phases, batches and the memory over
# time.


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


_WARM_UP = 3  # batches
_DRIFT = 100e-6  # of the time: by so much at most two clocks part; those of a virtual machine and its H100 by 20e-6
_AT_ONCE = 50_000  # ns: the length of a kernel or two, while the GPU is not behind yet
_AT_ONCE_OF_STEP = 0.02
_FEWEST = 3  # batches that tell something
_WITHOUT_WORK = frozenset({phase_log.WAIT, phase_log.OTHER, phase_log.WORKERS})


@dataclass(frozen=True, slots=True)
class GpuMark:
    """An event in the stream of the GPU, at the end of a phase."""

    batch: int  # number of the batch in the recording
    phase: str  # that ended with the event; "": it was not followed
    host: int  # nanoseconds just before it was put into the stream, by the host's clock
    gpu: int  # nanoseconds when the GPU came to it, by its own clock


@dataclass(frozen=True, slots=True)
class GpuObservations:
    """Everything that was read of a GPU's work during a fit."""

    marks: tuple[GpuMark, ...] = ()  # in the order of the GPU
    used: tuple[float, ...] = ()  # the driver's readings: shares 0…1 of its last moments with some kernel running (NVML)
    why_not: str = ""  # the reason why there are no marks
    name: str = ""  # of the GPU, by its driver; empty if the fit used none


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The work of the GPU in the steady state. Shares of the time from 0 to 1, None where too little was seen.

    `busy`, `paced` and `idle` add up to 1.
    """

    phases: tuple[tuple[str, int], ...] = ()  # median nanoseconds of a batch with the GPU at a phase's work, at most
    busy: float | None = None  # the GPU was behind the program
    paced: float | None = None  # it worked on pieces as the program gave them, which did not fill the time
    idle: float | None = None  # there was no work
    used: float | None = None  # mean of the driver's readings (NVML)
    note: str = ""  # how this is known, or the reason why it is not


def lags(marks: Sequence[GpuMark]) -> list[int]:
    """Return by how many nanoseconds the GPU came to each event after it could have: how far it was behind.

    No event comes before it was put into the stream. So the two clocks part along the line below all delays that is nearest to
    them: the edge of their lower hull over the middle of the time.
    """
    if not marks:
        return []
    delays = [(mark.host, mark.gpu - mark.host) for mark in marks]
    drift = max(-_DRIFT, min(_DRIFT, _slope_below(delays)))
    apart = [delay - drift * (host - marks[0].host) for host, delay in delays]
    least = min(apart)
    return [round(each - least) for each in apart]


def _slope_below(points: Sequence[tuple[int, int]]) -> float:
    """Return the slope of the lower hull of points at the middle of them; 0 where there is none."""
    hull: list[tuple[int, int]] = []
    for x, y in points:
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    middle = sum(x for x, _ in points) / len(points)
    for (x0, y0), (x1, y1) in pairwise(hull):
        if x0 < x1 and x0 <= middle <= x1:
            return (y1 - y0) / (x1 - x0)
    return 0.0


def _is_above(first: tuple[int, int], point: tuple[int, int], last: tuple[int, int]) -> bool:
    """Say whether a point is on the line from the first to the last, or above it."""
    return (point[0] - first[0]) * (last[1] - first[1]) <= (last[0] - first[0]) * (point[1] - first[1])


def gpu_facts(marks: Sequence[GpuMark], used: Sequence[float] = (), why_not: str = "") -> GpuFacts:
    """Return the GPU's work by the events in its stream.

    Args:
        marks: of the fit, in order.
        used: readings of the driver, shares of its last moments with some kernel running.
        why_not: why there are no events, if so.
    """
    driver = sum(used) / len(used) if used else None
    batches = _steady(marks)
    kinds, by_phase = _sums(marks, batches)
    total = sum(kinds.values())
    if len(batches) < _FEWEST or not total:
        return GpuFacts(used=driver, note=why_not or "too few batches were followed on the GPU")
    busy, paced, idle = (kinds[kind] / total for kind in ("busy", "paced", "idle"))
    medians = tuple((phase, round(median(times.values()))) for phase, times in by_phase.items() if times)
    return GpuFacts(phases=medians, busy=busy, paced=paced, idle=idle, used=driver, note=_note(len(batches), paced, driver))


def _steady(marks: Sequence[GpuMark]) -> set[int]:
    """Return the numbers of the batches of the steady state: of training batches, if there are any."""
    training = {mark.batch for mark in marks if mark.phase in (phase_log.BACKWARD, phase_log.STEP)}
    return {number for number in training or {mark.batch for mark in marks} if number > _WARM_UP}


def _sums(marks: Sequence[GpuMark], batches: set[int]) -> tuple[dict[str, int], dict[str, dict[int, int]]]:
    """Return the GPU's nanoseconds by kind (busy, paced, idle), and by phase and batch where there was work."""
    kinds: dict[str, int] = defaultdict(int)
    by_phase: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    lag_at, limit = lags(marks), _limit(marks)
    for at in range(1, len(marks)):
        mark, time = marks[at], max(0, marks[at].gpu - marks[at - 1].gpu)
        if not mark.phase or mark.batch not in batches:
            continue
        kind = "busy" if lag_at[at] > limit else "idle" if mark.phase in _WITHOUT_WORK else "paced"
        kinds[kind] += time
        if kind != "idle":
            by_phase[mark.phase][mark.batch] += time
    return kinds, by_phase


def _limit(marks: Sequence[GpuMark]) -> float:
    """Return the greatest lag of events that the GPU came to at once."""
    begins: dict[int, list[int]] = defaultdict(list)
    for mark in marks:
        if mark.phase:
            begins[mark.batch].append(mark.host)
    spans = [max(times) - min(times) for times in begins.values()]
    return max(_AT_ONCE, _AT_ONCE_OF_STEP * median(spans)) if spans else _AT_ONCE


def _note(batches: int, paced: float, driver: float | None) -> str:
    words = f"by CUDA events in {counted(batches, 'batch', 'batches')}: so long it was behind the program"
    if paced > 0.01:
        words += f"; in another {paced:.0%} it worked on small pieces as the program gave them, for a part of that time"
    if driver is not None:
        words += f"; the driver says {driver:.0%} on average"
    return words
