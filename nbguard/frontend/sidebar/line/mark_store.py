"""The marks on the time axis, such as cells with their peaks, epochs of fits, requests for memory that failed. Bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import merge

from nbguard.frontend.sidebar.protocol.state import DevicePeak, LinePoint, TimeMark
from nbguard.frontend.sidebar.protocol.truncation import truncate_utf8
from nbguard.units import format_bytes

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
            mark = TimeMark(kind="cell", label=label, t=round(t, 1), cell=number, cell_id=cell_id)
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
        mark = TimeMark(kind="request", label=label, t=round(t, 1), end=round(t, 1), cell=cell, device=device, nbytes=nbytes)
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
                self._epochs[-1] = replace(last, end=round(t, 1))
            if number is not None:
                self._epochs.append(TimeMark(kind="epoch", label=f"epoch {number}", t=round(t, 1), epoch=number))

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
            self._cells.append(replace(_with_peaks(self._open), end=round(t, 1)))
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
