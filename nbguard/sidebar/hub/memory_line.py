"""The line of a kernel's memory: the readings of all devices, and the marks of its cells, epochs and failed requests."""

from __future__ import annotations

from collections.abc import Mapping

from nbguard.memory.counters import TickReading
from nbguard.memory.oom_facts import OomFact
from nbguard.sidebar.protocol.line_store import LineStore
from nbguard.sidebar.protocol.mark_store import AllocatorPeak, MarkStore
from nbguard.sidebar.protocol.state import DeviceLine, FitTick, LineHistory, LinePoint, TimeMark

POINTS = 240
"""So many points are sent of all devices together."""
_LEAST = 40
_MARKS = 200
_IN_A_TICK = 5
"""So many of the newest marks go with each tick."""


class MemoryLine:
    """The line of each device, and the marks. Readings come from the sampler's thread, cells from the kernel's main thread."""

    def __init__(self) -> None:
        self._lines: dict[str, LineStore] = {}
        self._peaks: dict[str, int] = {}  # by device, the peak counter at the last reading
        self._newest = 0.0  # time of the last reading
        self._marks = MarkStore()

    def add(self, points: Mapping[str, LinePoint], reading: TickReading) -> dict[str, LinePoint]:
        """Note a reading; return its points, as high as the peak counters say that memory has been since the one before."""
        peaks = {each.device: each.allocator.peak_allocated for each in reading.devices if each.allocator is not None}
        raised = {device: self._raised(device, point, peaks.get(device)) for device, point in points.items()}
        for device, point in raised.items():
            self._newest = point.until
            self._lines.setdefault(device, LineStore()).add(point)
        self._marks.observe(raised, peaks)
        return raised

    def begin_cell(self, t: float, number: int, cell_id: str, counters: Mapping[str, AllocatorPeak] | None) -> None:
        """Note that a cell begins, with the counters at that moment by device; None: not known."""
        self._marks.begin_cell(t, number, cell_id, counters)

    def end_cell(self, t: float, counters: Mapping[str, AllocatorPeak] | None, oom: OomFact | None) -> None:
        """Note that it has ended, and the request that failed in it, if one is known."""
        self._marks.end_cell(t, counters)
        requested = 0 if oom is None else oom.requested or 0
        if oom is not None and requested:
            moment = t if oom.note is None or oom.note.time is None else oom.note.time
            self._marks.fail_request(moment, oom.cell, oom.device, requested)

    def follow(self, t: float, fit: FitTick | None) -> None:
        """Note the epoch of the fit that runs; None: none does."""
        self._marks.follow_epoch(t, None if fit is None else fit.epoch, is_fitting=fit is not None)

    def newest_marks(self) -> tuple[TimeMark, ...]:
        """Return the newest marks, which may have changed since the last tick."""
        return self._marks.newest(_IN_A_TICK)

    def history(self, seconds: int, n: int) -> LineHistory:
        """Return the lines of the last `seconds` (0: of all that is kept) up to the `n`-th tick, in few points."""
        since = self._newest - seconds if seconds else 0.0
        share = max(_LEAST, POINTS // max(1, len(self._lines)))
        lines = tuple(DeviceLine(device, line.points(since, share)) for device, line in self._lines.items())
        return LineHistory(seconds=float(seconds), n=n, lines=lines, marks=self._marks.marks(since)[-_MARKS:])

    def _raised(self, device: str, point: LinePoint, peak: int | None) -> LinePoint:
        """Return the point, as high as the peak counter if that has risen since the last reading: a spike between the two."""
        before = self._peaks.get(device)
        if peak is None:
            return point
        self._peaks[device] = peak
        has_risen = before is not None and peak > before
        return point._replace(high=max(point.high, peak)) if has_risen else point
