"""The work of a GPU in a fit, from events in its stream, with the times of recording each and of its completion on the GPU.

An event that the GPU comes to at once has found it with nothing left to do. The delay of any other event is how far the GPU is
behind the program. The two clocks are set against each other by the events that took least.

On an H100 the share of time with running kernels, by CUPTI, lay between the busy share here, and that with `paced` added:
tests/data/profile/gpu_marks.json.gz has the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import counted

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
