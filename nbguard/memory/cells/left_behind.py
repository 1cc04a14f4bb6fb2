"""Memory that a cell leaves without a name, read from counters after a cell that failed or took its time, then scanned."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nbguard.units import MiB

if TYPE_CHECKING:
    from nbguard.memory.cells.cell_counters import CellCounters
    from nbguard.memory.cells.hooks import CellFact
    from nbguard.memory.core.counters import Reading
    from nbguard.memory.reports.notices.judge import HeldStorages
    from nbguard.memory.reports.notices.notice import Notice

_FLOOR = MiB // 2
"""Bytes below which nothing is worth a notice, whatever its share: of a notebook that holds 12 MiB a hundredth is no news."""
_SHARE = 100
"""Share of the tensors' bytes, a hundredth, that is worth a notice where it is less than the usual limit."""
_QUICK = 0.02
"""Least seconds of a cell that ended well and whose leftovers are examined."""


class LeftBehind:
    """Looks for memory that a cell left without a name, held by its error, its result or a library's cache.

    The counters are read after each cell, and the heap is scanned only where they grew: always after a cell that has
    failed, and after others that took their time for no more than a fiftieth of the session.
    """

    def __init__(self, counters: CellCounters) -> None:
        self.patience = 50  # times the seconds of the last scan before the next one, after cells that end well
        self._counters = counters
        self._reading: Reading | None = None  # the last one
        self._held: HeldStorages | None = None  # at the last scan
        self._held_bytes = 0  # of all that it has: asked for after every cell
        self._began = 0.0  # when the cell did, by the clock of `perf_counter`
        self._looked = 0.0  # when the last scan ended
        self._seconds = 0.0  # that it took

    def before(self) -> None:
        """Note when the cell begins; nothing is read."""
        self._began = time.perf_counter()
        if self._reading is None:
            self._reading = self._counters.read()

    def least(self, least: int) -> int:
        """Return the bytes that are worth a notice: `least`, or a hundredth of the tensors' bytes when last known, if less."""
        if self._reading is not None and self._reading.devices:
            held = sum(counted.allocated for counted in self._reading.devices)
        elif self._held is not None:
            held = self._held_bytes
        else:
            return least
        return min(least, max(_FLOOR, held // _SHARE))

    def after(self, cell: CellFact, least: int) -> Notice | None:
        """Return the notice on memory that the cell left without a name, if there is enough of it."""
        now, before = time.perf_counter(), self._reading
        reading = self._reading = self._counters.read()
        has_grown = reading is not None and before is not None and reading.grown_by(before) >= least
        is_due = now - self._began >= _QUICK and now - self._looked >= self.patience * self._seconds
        if cell.scan.last is None and not (has_grown and (cell.raised or is_due)):
            return None
        return self._look(cell, least)

    def _look(self, cell: CellFact, least: int) -> Notice | None:
        from nbguard.memory.reports.notices.judge import held_storages
        from nbguard.memory.reports.notices.left import judge_left

        start = time.perf_counter()
        analysis = cell.scan.get().analysis
        notice = judge_left(analysis, cell.number, self._held, least, raised=cell.raised)
        self._held = analysis.once(held_storages)
        self._held_bytes = sum(nbytes for nbytes, _ in self._held.values())
        self._reading = self._counters.read_now()  # leftovers of the scan itself on the heap are nobody's
        self._looked = time.perf_counter()
        self._seconds = self._looked - start
        return notice
