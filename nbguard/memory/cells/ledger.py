"""The ledger of each cell's memory, with counters after every cell, and a scan for the holders only where they changed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nbguard.memory.cells.hooks import CellCounters, CellFact
from nbguard.memory.core.counters import Reading
from nbguard.memory.reports.cell_ledger import (
    NOTHING,
    PROCESS,
    CellHoldings,
    CellRecord,
    DeviceChange,
    History,
    cell_holdings,
    changes,
    compare,
)
from nbguard.memory.scan.scan import Notebook, TimedScan, timed_scan

_KEPT = 1000
_TOO_SLOW = 1.0
"""Most seconds of a scan. After three in a row that took longer, only the counters are read."""
_PATIENCE = 3


class Ledger:
    """Keeps a record of each cell and, if `shows`, hands those that changed memory to `show`."""

    name = "the ledger of cells"
    rank = 30

    def __init__(self, shell: Any, show: Callable[[CellRecord], None], counters: CellCounters) -> None:
        self.shows = False
        self._shell = shell
        self._show = show
        self._records: deque[CellRecord] = deque(maxlen=_KEPT)
        self._counters = counters
        self._before: Reading | None = None
        self._last: Reading | None = None
        self._seen: Reading | None = None
        self._known: CellHoldings = NOTHING
        self._slow = 0.0  # seconds of the last scan, once it is too slow
        self._slow_looks = 0

    @property
    def history(self) -> History:
        """Return the records so far."""
        return History(tuple(self._records))

    def start(self, *, shows: bool) -> None:
        """Begin with the present state. Holders are scanned if `shows`, and on a CPU, where nothing else counts."""
        self._before = self._last = self._counters.read_now()
        self._known = NOTHING
        self.show_lines(on=shows)

    def show_lines(self, *, on: bool) -> None:
        """Show lines from now on, or no longer."""
        self.shows, self._slow, self._slow_looks = on, 0.0, 0
        reading = self._counters.read_now()
        if reading is not None and self._looks(reading):
            self._known = self._look(timed_scan(Notebook(self._shell, self._shell.user_ns)))[0]
            reading = self._counters.read_now()
        elif not on:
            self._known = NOTHING
        self._seen = reading

    def before(self) -> None:
        """Read the counters."""
        self._before = self._counters.read()

    def after(self, cell: CellFact) -> None:
        """Read the counters again; look at the holders if they changed; keep the record and show it if it says something."""
        reading = self._counters.read()
        if reading is None:
            return
        record = CellRecord(cell=cell.number, raised=cell.raised, devices=self._changes(reading))
        if reading.differs(self._seen) or is_rebound(self._known.names, self._shell.user_ns):
            record, reading = self._explain(record, reading, cell)
        self._before, self._last = None, reading
        self._records.append(record)
        if self.shows and record.is_worth_a_line:
            self._show(record)

    def _changes(self, reading: Reading) -> tuple[DeviceChange, ...]:
        if reading.devices:
            return tuple(changes(self._before or Reading(), reading, self._last))
        held = self._known.on_cpu
        return () if self._slow else (DeviceChange(device="cpu", before=held, after=held),)

    def _looks(self, reading: Reading) -> bool:
        return not self._slow and (self.shows or not reading.devices)

    def _explain(self, record: CellRecord, reading: Reading, cell: CellFact) -> tuple[CellRecord, Reading]:
        """Return the record with the holders of memory that came, went or became stale, and the counters after the scan."""
        former, self._seen = self._seen, reading
        if not self._looks(reading):
            return self._unseen(record, reading, former), reading
        holdings, seconds = self._look(cell.scan.get())
        came, went, stale = compare(self._known, holdings)
        if not reading.devices:
            record = replace(record, devices=(DeviceChange(device="cpu", before=self._known.on_cpu, after=holdings.on_cpu),))
            self._seen = reading = self._counters.read_now() or reading  # the scan's own leftovers on the heap are no change
        self._known = holdings
        return replace(record, came=came, went=went, stale=stale, seconds=seconds), reading

    def _unseen(self, record: CellRecord, reading: Reading, former: Reading | None) -> CellRecord:
        unseen = f"a scan takes {self._slow:.1f} s here" if self._slow and self.shows else ""
        devices = record.devices
        grown = None if reading.devices or former is None else reading.grown_since(former)
        if grown is not None and reading.heap is not None:
            devices = (DeviceChange(device=PROCESS, before=reading.heap - grown, after=reading.heap),)
        return replace(record, devices=devices, unseen=unseen)

    def _look(self, scan: TimedScan) -> tuple[CellHoldings, float]:
        """Return the holders that a scan has met, and the seconds that this took with the scan."""
        start = time.perf_counter()
        holdings = cell_holdings(scan.analysis)
        seconds = scan.seconds + time.perf_counter() - start
        self._slow_looks = self._slow_looks + 1 if seconds > _TOO_SLOW else 0
        self._slow = seconds if self._slow_looks >= _PATIENCE else 0.0
        return holdings, seconds


def is_rebound(names: Mapping[str, int], namespace: Mapping[str, Any]) -> bool:
    """Say whether one of `names`, each given with its object's id, was deleted or bound again.

    That may leave memory stale that does not change.
    """
    return any(id(namespace.get(name)) != ref for name, ref in names.items())
