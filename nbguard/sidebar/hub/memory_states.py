"""What the last look at the heap found, for all sidebars: looked at again only when something may have changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nbguard.cells.ledger import is_rebound
from nbguard.errors import NoTorchError
from nbguard.memory.analysis import Analysis
from nbguard.memory.counters import Reading
from nbguard.reports.cell_ledger import names_of
from nbguard.scan.devices.counters import Counters
from nbguard.scan.scan import Notebook, scan
from nbguard.sidebar.protocol.experiments import names_of_learners
from nbguard.sidebar.protocol.memory_state import build_memory_state
from nbguard.sidebar.protocol.rows import Rows
from nbguard.sidebar.protocol.state import MemoryState

if TYPE_CHECKING:
    from nbguard.memory.facts import Facts


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
        since, start, notebook = time.time(), time.perf_counter(), self._notebook()
        self._was_beside = notebook.is_running
        try:
            facts = scan(notebook).facts
        except NoTorchError:
            return False
        return self._take(facts, since, time.perf_counter() - start)

    def _take(self, facts: Facts, since: float, seconds: float) -> bool:
        """Take what a look has found that began at the time `since`; return whether it is another than before."""
        self.names, self.learners = names_of(facts.graph), names_of_learners(facts)
        self._seen, is_first = self._counters.read(), self.rows is None
        found, self.rows = build_memory_state(Analysis(facts), self._boot, self.last.heap, since, seconds, self.cell)
        is_same = replace(self.last, t=since, seconds=seconds, cell=found.cell) == found and not is_first
        self.last = found if is_same else replace(found, heap=found.heap + 1)
        return not is_same
