"""Cells that are run again and again, and whether each run leaves more memory than the one before."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbguard.memory.core.facts import Reading
from nbguard.memory.reports.notices.causes import HeldStorages, held_storages
from nbguard.memory.reports.notices.notice import Notice
from nbguard.memory.reports.notices.rounds import diagnose_growth

if TYPE_CHECKING:
    from nbguard.memory.cells.hooks import CellCounters, CellFact

_CELLS = 20
"""Cells that are remembered, by their sources."""


@dataclass(slots=True)
class _Runs:
    """The runs of one cell."""

    number: int = 0  # of its runs so far
    held: HeldStorages | None = None  # after the last run, if that left more; None if it did not, or nobody has looked
    cell: int | None = None  # number of the run that left that
    first: int | None = None  # number of the run since which each left more, or None while they do not


class Repeats:
    """Reads the counters around a cell that has been run before, and says when each run leaves more."""

    def __init__(self, counters: CellCounters) -> None:
        self._cells: OrderedDict[int, _Runs] = OrderedDict()
        self._counters = counters
        self._runs: _Runs | None = None
        self._before: Reading | None = None

    def before(self, source: str) -> None:
        """Read the counters, if a cell with this source has been run before."""
        key = hash(source)
        self._runs = self._cells.setdefault(key, _Runs())
        self._cells.move_to_end(key)
        if len(self._cells) > _CELLS:
            self._cells.popitem(last=False)
        self._before = self._counters.read() if self._runs.number else None

    def after(self, least: int) -> bool:
        """Say whether this run, not the first of its cell, left at least `least` bytes more, which is worth a scan."""
        runs, self._runs = self._runs, None
        if runs is None:
            return False
        runs.number += 1
        if self._before is None:
            return False
        reading, before = self._counters.read(), self._before
        self._before = None
        if reading is None or reading.grown_by(before) < least:
            runs.held = runs.first = None
            return False
        self._runs = runs
        return True

    def diagnose(self, cell: CellFact, least: int) -> Notice | None:
        """Return the notice on the cell that just ended, or None at the first scan, which the next one is compared with."""
        runs, self._runs = self._runs, None
        if runs is None:
            return None
        analysis = cell.scan.get().analysis
        former, runs.held = runs.held, analysis.once(held_storages)
        growth = None if former is None else diagnose_growth(analysis, cell.number, former, least, runs.cell)
        runs.cell = cell.number
        runs.first = None if growth is None else runs.first or cell.number
        return None if growth is None else replace(growth, shape=f"since In[{runs.first}]: {growth.shape}")
