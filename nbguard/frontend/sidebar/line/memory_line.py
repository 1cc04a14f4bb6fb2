"""The line of a kernel's memory, with the readings of all devices, and the marks of its cells, epochs and failed requests."""

from __future__ import annotations

from collections.abc import Mapping

from nbguard.frontend.sidebar.line.line_store import LineStore
from nbguard.frontend.sidebar.line.mark_store import AllocatorPeak, MarkStore
from nbguard.frontend.sidebar.protocol.state import DeviceLine, FitTick, LineHistory, LinePoint, TimeMark
from nbguard.memory.core.counters import TickReading
from nbguard.memory.core.oom_facts import OomFact

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
