"""The line of a kernel's memory, with the readings of all devices, and the marks of its cells, epochs and failed requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from heapq import merge
from itertools import chain

from nbguard.frontend.sidebar.protocol.state import DeviceLine, DevicePeak, FitTick, LineHistory, LinePoint, TimeMark
from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
from nbguard.memory.core.facts import TickReading
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.reports.report import Report
from nbguard.render.html import blocks_html
from nbguard.render.markup import Html, tag
from nbguard.units import format_bytes

# --- The picture of a sidebar, that is, HTML that stays with a saved notebook, and needs no kernel and no script.


_MOMENT = "font-size:12px;color:var(--jp-ui-font-color2,#767676)"


def report_picture(report: Report, cell: int | None, t: float) -> Html:
    """Return the picture of a report. `cell` is the last one that had run, None before any; `t` in seconds since the epoch."""
    return picture(blocks_html(report.blocks(), report.label), cell, t)


def picture(body: Html, cell: int | None, t: float) -> Html:
    """Return `body` with a line that dates it."""
    when = f"{datetime.fromtimestamp(t):%Y-%m-%d %H:%M}"
    last = "" if cell is None else f" In[{cell}],"
    return tag("div", tag("p", f"The sidebar as of{last} {when}. For a live one run the cell.", style=_MOMENT), body)


# --- The marks on the time axis, such as cells with their peaks, epochs of fits, requests for memory that failed. Bounded.


CELLS, EPOCHS, REQUESTS = 300, 100, 50
"""So many of each are kept: epochs never push out a cell."""
_FLICKER = 2.0
"""Most seconds that a fit may be out of sight without having ended: frames change while they are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeak:
    """The counters of one device's allocator at a cell's beginning or end, in bytes."""

    allocated: int  # allocated_bytes.all.current
    peak: int | None  # allocated_bytes.all.peak, since the start or since somebody reset it; None if it is not counted


_UNUSED = AllocatorPeak(allocated=0, peak=0)
"""The counters of a device that this process has not used."""


@dataclass(kw_only=True)
class _OpenCell:
    """The cell that runs."""

    mark: TimeMark
    before: Mapping[str, AllocatorPeak] | None  # by device, as it began; None if unknown
    last_run: TimeMark | None  # of the same cell, by its id; None if none is kept
    highs: dict[str, int] = field(default_factory=dict)  # by device, the most bytes of the readings so far
    peaks: dict[str, int] = field(default_factory=dict)  # by device, the peak counter once it has risen in this cell
    reached: TimeMark | None = None  # the mark with its peaks; None if they have risen since it was made


class MarkStore:
    """Keeps the marks of a kernel. Cells begin and end on its main thread, ticks come from the sampler's: a lock is between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cells: deque[TimeMark] = deque(maxlen=CELLS)
        self._epochs: deque[TimeMark] = deque(maxlen=EPOCHS)
        self._requests: deque[TimeMark] = deque(maxlen=REQUESTS)
        self._open: _OpenCell | None = None

    def begin_cell(self, t: float, number: int, cell_id: str, before: Mapping[str, AllocatorPeak] | None) -> None:
        """Note that a cell begins, with the counters at that moment by device, or None if they are unknown."""
        with self._lock:
            self._close(t)
            label, cell_id = f"In[{number}]", truncate_utf8(cell_id, 64)
            last_run = next((cell for cell in reversed(self._cells) if cell_id and cell.cell_id == cell_id), None)
            mark = TimeMark(kind="cell", label=label, t=round(t, 2), cell=number, cell_id=cell_id)
            self._open = _OpenCell(mark=mark, before=before, last_run=last_run)
            self._observe({device: (each.allocated, each.peak) for device, each in (before or {}).items()})

    def observe(self, points: Mapping[str, LinePoint], peaks: Mapping[str, int | None]) -> None:
        """Note a reading by device, and the allocators' peak counters with it."""
        with self._lock:
            self._observe({device: (point.high, peaks.get(device)) for device, point in points.items()})

    def end_cell(self, t: float, after: Mapping[str, AllocatorPeak] | None) -> None:
        """Note that the cell ended, with the counters at that moment."""
        with self._lock:
            self._observe({device: (each.allocated, each.peak) for device, each in (after or {}).items()})
            self._close(t)

    def fail_request(self, t: float, cell: int | None, device: str, nbytes: int) -> None:
        """Note that a request for `nbytes` on `device` failed."""
        label = f"{format_bytes(nbytes)} asked"
        mark = TimeMark(kind="request", label=label, t=round(t, 2), end=round(t, 2), cell=cell, device=device, nbytes=nbytes)
        with self._lock:
            self._requests.append(mark)

    def follow_epoch(self, t: float, number: int | None, *, is_fitting: bool) -> None:
        """Note the epoch of the fit that runs at the time `t`, or None if it is unknown at this moment or no fit runs."""
        with self._lock:
            last = self._epochs[-1] if self._epochs else None
            if is_fitting and number is None:
                return
            if last is not None and last.epoch == number and (last.end is None or t - last.end < _FLICKER):
                if last.end is not None:
                    self._epochs[-1] = replace(last, end=None)
                return
            if last is not None and last.end is None:
                self._epochs[-1] = replace(last, end=round(t, 2))
            if number is not None:
                self._epochs.append(TimeMark(kind="epoch", label=f"epoch {number}", t=round(t, 2), epoch=number))

    def marks(self, since: float) -> tuple[TimeMark, ...]:
        """Return the marks that reach beyond the time `since`, oldest first."""
        with self._lock:
            cells = [*self._cells, *(() if self._open is None else (_with_peaks(self._open),))]
            marks = merge(cells, self._epochs, self._requests, key=lambda mark: mark.t)
            return tuple(mark for mark in marks if mark.end is None or mark.end >= since)

    def newest(self, most: int) -> tuple[TimeMark, ...]:
        """Return the newest `most` marks, which may have changed since the last tick, oldest of them first.

        Before them, if it is none of them, stands the last run of the cell that runs: a view that has no history predicts by
        it how much the cell will reach.
        """
        with self._lock:
            running = () if self._open is None else (_with_peaks(self._open),)
            tails = (_tail(self._cells, most), running, _tail(self._epochs, 2), _tail(self._requests, 1))
            last_run = None if self._open is None else self._open.last_run
        marks = sorted((mark for tail in tails for mark in tail), key=lambda mark: mark.t)[-most:]
        return (*(() if last_run is None or last_run in marks else (last_run,)), *marks)

    def _observe(self, readings: Mapping[str, tuple[int, int | None]]) -> None:
        if self._open is None:
            return
        cell = self._open
        for device, (allocated, peak) in readings.items():
            if allocated > cell.highs.get(device, -1):
                cell.highs[device], cell.reached = allocated, None
            before = None if cell.before is None else cell.before.get(device, _UNUSED)
            if peak is not None and before is not None and peak > max(before.peak or 0, cell.peaks.get(device, 0)):
                cell.peaks[device], cell.reached = peak, None

    def _close(self, t: float) -> None:
        if self._open is not None:
            self._cells.append(replace(_with_peaks(self._open), end=round(t, 2)))
            self._open = None


def _with_peaks(cell: _OpenCell) -> TimeMark:
    if cell.reached is None:
        peaks = (
            DevicePeak(device, max(high, cell.peaks.get(device, 0)), device in cell.peaks)
            for device, high in cell.highs.items()
        )
        cell.reached = replace(cell.mark, peaks=tuple(peaks))
    return cell.reached


def _tail(marks: deque[TimeMark], most: int) -> Iterable[TimeMark]:
    return [marks[place] for place in range(-min(most, len(marks)), 0)]


# --- The line of one device over hours, in bounded memory, exact while readings are few, in ever wider buckets as they grow
# old.
#
# Equal readings in a row are one point however long they last, so that a step stays a step. Where readings change faster than
# a level keeps them, the oldest are merged into buckets of time on a fixed grid. A bucket keeps the least, the most and the
# last of its readings: no maximum is ever lost.


GAP = 12.0
"""Least seconds without a reading that make a gap: no view was open, or the kernel could not tell."""

LEVELS: tuple[tuple[float, int], ...] = ((0.0, 600), (2.0, 450), (15.0, 480), (120.0, 720), (1200.0, 504))
"""(seconds of a bucket, points kept) from the newest level on. If every reading differs, that is 2 min at 4 Hz, then 15 min,
2 h, a day, a week; older readings are dropped."""


class LineStore:
    """The points of one device's line, newest first among the levels, oldest first within each."""

    def __init__(self) -> None:
        self._levels: tuple[deque[LinePoint], ...] = tuple(deque() for _ in LEVELS)

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def add(self, point: LinePoint) -> None:
        """Note a reading, later than all before."""
        newest = self._levels[0]
        if newest and _is_same(newest[-1], point):
            newest[-1] = merged(newest[-1], point)
        else:
            newest.append(point)
        for place, (_, kept) in enumerate(LEVELS):
            level = self._levels[place]
            if len(level) <= kept:
                return
            oldest = level.popleft()
            if place + 1 < len(LEVELS):
                _append(self._levels[place + 1], oldest, LEVELS[place + 1][0])

    def points(self, since: float, most: int) -> tuple[LinePoint, ...]:
        """Return the line from the time `since` on, oldest first, in at most about `most` points.

        Buckets lie on a fixed grid: a point does not change as it grows older, only as the grid gets wider.
        """
        kept = [point for point in chain.from_iterable(reversed(self._levels)) if point.until >= since]
        if len(kept) <= most:
            return tuple(kept)
        span = kept[-1].until - max(since, kept[0].since)
        return thinned(kept, _width(2.2 * span / max(1, most)))

    @property
    def since(self) -> float | None:
        """Return the time of the oldest reading; None without any."""
        return next((level[0].since for level in reversed(self._levels) if level), None)


def thinned(points: Iterable[LinePoint], width: float) -> tuple[LinePoint, ...]:
    """Return points with those that lie in one bucket of `width` seconds merged; one that reaches further stays alone."""
    line: deque[LinePoint] = deque()
    for point in points:
        _append(line, point, width)
    return tuple(line)


def merged(first: LinePoint, second: LinePoint) -> LinePoint:
    """Return two points as one, the second later than the first."""
    low, high = min(first.low, second.low), max(first.high, second.high)
    return second._replace(since=first.since, low=low, high=high)


def _append(line: deque[LinePoint], point: LinePoint, width: float) -> None:
    if line and line[-1].since // width == point.until // width:
        line[-1] = merged(line[-1], point)
    else:
        line.append(point)


def _is_same(last: LinePoint, point: LinePoint) -> bool:
    """Say whether a reading goes on with the last point: all figures are equal, and no time without readings lies between."""
    is_flat = last.low == last.high == point.low == point.high
    return is_flat and last[4:] == point[4:] and point.since - last.until <= GAP


def _width(seconds: float) -> float:
    """Return the width of a grid's buckets: the next power of two, so that the grid stays as the line grows."""
    width = 0.25
    while width < seconds:
        width *= 2
    return width


POINTS = 240
"""So many points are sent of all devices together."""
_LEAST = 40
_CELLS, _OTHERS = 120, 60
"""So many cells, and so many epochs and failed requests, are sent: none of these pushes out a cell."""
_IN_A_TICK = 5
"""So many of the newest marks go with each tick."""


class MemoryLine:
    """The line of each device, and the marks. Readings come from the sampler's thread, cells from the kernel's main thread."""

    def __init__(self) -> None:
        self._lines: dict[str, LineStore] = {}
        self._peaks: dict[str, int] = {}  # by device, the peak counter at the last reading
        self._newest: float | None = None  # time of the last reading; None if there was none
        self._marks = MarkStore()

    def add(self, t: float, points: Mapping[str, LinePoint], reading: TickReading) -> dict[str, LinePoint]:
        """Note the reading of the time `t`; return its points, as high as the peak counters say it was since the last."""
        peaks = {each.device: each.allocator.peak_allocated for each in reading.devices if each.allocator is not None}
        raised = {device: self._raised(device, point, peaks.get(device)) for device, point in points.items()}
        for device, point in raised.items():
            self._line(device).add(point)
        self._marks.observe(raised, peaks)
        self._peaks = {device: peak or 0 for device, peak in peaks.items()}
        self._newest = t
        return raised

    def begin_cell(self, t: float, number: int, cell_id: str, counters: Mapping[str, AllocatorPeak] | None) -> None:
        """Note that a cell begins, with the counters at that moment by device, or None if unknown."""
        self._marks.begin_cell(t, number, cell_id, counters)

    def end_cell(self, t: float, counters: Mapping[str, AllocatorPeak] | None, oom: OomFact | None) -> None:
        """Note that it ended, and the request that failed in it, if one is known."""
        self._marks.end_cell(t, counters)
        requested = 0 if oom is None else oom.requested or 0
        if oom is not None and requested:
            moment = t if oom.note is None or oom.note.time is None else oom.note.time
            self._marks.fail_request(moment, oom.cell, oom.device, requested)

    def follow(self, t: float, fit: FitTick | None) -> None:
        """Note the epoch of the fit that runs, or None without one."""
        self._marks.follow_epoch(t, None if fit is None else fit.epoch, is_fitting=fit is not None)

    def newest_marks(self) -> tuple[TimeMark, ...]:
        """Return the newest marks, which may have changed since the last tick, and the last run of the cell that runs."""
        return self._marks.newest(_IN_A_TICK)

    def history(self, seconds: int, n: int) -> LineHistory:
        """Return the lines of the last `seconds` (all that is kept if 0) up to the `n`-th tick, in few points."""
        since = self._newest - seconds if seconds and self._newest is not None else 0.0
        share = max(_LEAST, POINTS // max(1, len(self._lines)))
        lines = tuple(DeviceLine(device, line.points(since, share)) for device, line in self._lines.items())
        marks = self._marks.marks(since)
        cells = [mark for mark in marks if mark.kind == "cell"][-_CELLS:]
        others = [mark for mark in marks if mark.kind != "cell"][-_OTHERS:]
        shown = tuple(sorted((*cells, *others), key=lambda mark: mark.t))
        return LineHistory(seconds=float(seconds), n=n, lines=lines, marks=shown)

    def _line(self, device: str) -> LineStore:
        """Return the line of a device. One that is used for the first time had nothing at the reading before."""
        if device not in self._lines:
            self._lines[device] = LineStore()
            if self._newest is not None:
                t = round(self._newest, 2)
                self._lines[device].add(
                    LinePoint(since=t, until=t, low=0, high=0, allocated=0, reserved=0, others=None, free=None)
                )
        return self._lines[device]

    def _raised(self, device: str, point: LinePoint, peak: int | None) -> LinePoint:
        """Return the point, as high as the peak counter if that has risen since the last reading: a spike between the two."""
        if peak is None or self._newest is None or peak <= self._peaks.get(device, 0):
            return point
        return point._replace(high=max(point.high, peak))
