"""The latest state of the memory, for all sidebars: scanned again only when something may have changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from nbguard.cells.ledger import is_rebound
from nbguard.errors import NoTorchError
from nbguard.memory.counters import Reading
from nbguard.reports.cell_ledger import names_of
from nbguard.scan.devices.counters import Counters
from nbguard.scan.scan import Notebook, TimedScan, timed_scan
from nbguard.sidebar.protocol.experiments import names_of_learners
from nbguard.sidebar.protocol.memory_state import build_memory_state
from nbguard.sidebar.protocol.rows import Rows
from nbguard.sidebar.protocol.state import MemoryState


class MemoryStates:
    """Keeps the last heap as sidebars have it, with its number, and what the ids of its rows stand for: text, no object.

    `cell` is the last cell that has ended.
    """

    def __init__(self, notebook: Callable[[], Notebook], boot: str) -> None:
        self._notebook = notebook
        self._boot = boot
        self._counters = Counters()
        self._seen: Reading | None = None
        self._was_beside = False
        self._offered: TimedScan | None = None
        self._when_offered: Reading | None = None
        self.names: dict[str, int] = {}
        self.learners: dict[int, str] = {}
        self.cell: int | None = None
        self.last = MemoryState(boot=boot, heap=0, t=time.time(), seconds=0.0)
        self.rows: Rows | None = None

    @property
    def is_outdated(self) -> bool:
        """Say whether memory may have changed since the last look, as far as counters and names tell.

        What was looked at beside a running cell is: that cell had memory in its hands that has names now.
        """
        if self._was_beside:
            return True
        reading = self._counters.read()
        if reading is None:
            return False
        return reading.differs(self._seen) or is_rebound(self.names, self._notebook().namespace)

    def look(self) -> bool:
        """Look at the heap; return whether it is another than before."""
        try:
            has_changed = self._look()
        except NoTorchError:
            return False
        self._seen = self._counters.read()  # now that what the scan took for itself is given back
        return has_changed

    def _look(self) -> bool:
        scan, self._offered = self._offered, None
        notebook = self._notebook()
        self._was_beside = notebook.is_running
        if scan is None or not self._is_current(scan, notebook):
            scan = timed_scan(notebook)
        return self._take(scan)

    def offer(self, scan: TimedScan | None) -> None:
        """Have the next look show this scan, made for something else, unless memory changes until then; None: scan anew."""
        self._offered, self._when_offered = scan, None if scan is None else self._counters.read()

    def _is_current(self, scan: TimedScan, notebook: Notebook) -> bool:
        reading = self._counters.read()
        return (
            scan.is_beside == notebook.is_running
            and reading is not None
            and not reading.differs(self._when_offered)
            and not is_rebound(names_of(scan.facts.graph), notebook.namespace)
        )

    def _take(self, scan: TimedScan) -> bool:
        """Take a scan; return whether the heap is another than before."""
        facts, since, seconds = scan.facts, scan.since, scan.seconds
        self.names, self.learners = names_of(facts.graph), names_of_learners(facts)
        is_first = self.rows is None
        found, self.rows = build_memory_state(scan.analysis, self._boot, self.last.heap, since, seconds, self.cell)
        is_same = replace(self.last, t=since, seconds=seconds, cell=found.cell) == found and not is_first
        self.last = found if is_same else replace(found, heap=found.heap + 1)
        return not is_same
