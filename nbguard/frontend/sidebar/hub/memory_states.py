"""The latest state of the memory, for all sidebars, scanned again only after a change, and the lifetimes of its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbguard.errors import NoTorchError
from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state, is_cured, key_of_notice, notice_lines
from nbguard.frontend.sidebar.protocol.rows import Rows, names_of_learners
from nbguard.frontend.sidebar.protocol.state import MemoryState
from nbguard.frontend.sidebar.protocol.ticks import LastLook
from nbguard.memory.cells.name_watch import SeenMemory, bindings_of, is_rebound
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Counted, Reading
from nbguard.memory.core.requests import RequestLimits
from nbguard.memory.out_of_memory.card import build_card
from nbguard.memory.reports.cell_ledger import names_of
from nbguard.memory.reports.notices.notice import Notice, StorageKey
from nbguard.memory.scan.devices.counters import Counters
from nbguard.memory.scan.oom.failed_runs import passed_run
from nbguard.memory.scan.scan import Notebook, Scan, TimedScan, timed_scan

# --- Lifetimes of a memory state's rows and notices: weak references say without a scan which rows and notices are over.


Key = int | str
"""The number of a row, or the key of a notice."""


class Lifetimes:
    """Weak references to the memory of one memory state's rows and notices.

    Each reference is asked until it has expired once, so that an answer usually takes one check per row.
    """

    def __init__(self, left: Mapping[Key, Iterable[Any]]) -> None:
        """`left` are torch's weak references to the storages of each row or notice, None for a storage without one."""
        known = ((key, list(refs)) for key, refs in left.items())
        self._left = {key: refs for key, refs in known if refs and all(ref is not None for ref in refs)}

    @classmethod
    def of(cls, scan: Scan, rows: Rows, notices: Iterable[Notice]) -> Lifetimes:
        """Return the lifetimes of the rows of a scan, and of notices that hold by it."""
        weak = scan.tracker.storages
        left: dict[Key, Iterable[Any]] = {
            number: [weak[storage] for storage in storages] for number, storages in enumerate(rows.storages)
        }
        by_key: dict[StorageKey, Any] = {fact.key: ref for fact, ref in zip(scan.facts.graph.storages, weak, strict=True)}
        left |= {key_of_notice(one): [by_key[key] for key in one.storages if key in by_key] for one in notices}
        return cls(left)

    def over(self) -> frozenset[Key]:
        """Return the rows and notices whose memory has all been freed since the scan."""
        return frozenset(self._over())

    def _over(self) -> Iterator[Key]:
        for key, refs in self._left.items():
            while refs and refs[-1].expired():
                refs.pop()
            if not refs:
                yield key


def without(state: MemoryState, over: Collection[Key]) -> MemoryState:
    """Return a memory state without expired parts: rows with stale bytes and Learners, notices, findings, the card."""
    freed = sum(row.stale_bytes for row in state.holders if row.id in over)
    return replace(
        state,
        stale=max(0, state.stale - freed),
        holders=tuple(row for row in state.holders if row.id not in over),
        experiments=tuple(one for one in state.experiments if one.id not in over),
        findings=tuple(one for one in state.findings if one.key not in over),
        notices=tuple(one for one in state.notices if one.key not in over),
        oom=None if state.oom is None or state.oom.key in over else state.oom,
    )


_CHANGING = (Counted(device="", allocated=-1),)
"""Counters that no reading is equal to."""


class MemoryStates:
    """Keeps the last memory state as sidebars have it, with its number, and its facts: numbers and text, no object.

    Args:
        notebook: returns where the names live, and whether a cell runs beside the thread that asks.
        boot: the name of this run of the kernel.
        cells: returns the numbers of the last cell that ended, and of the cell that runs.
        notices: returns the notices on objects still in memory.
        recall: tells an analysis the findings on its failure.

    Between two scans it takes back expired parts. That is asked for in another thread than the one that scans.
    """

    def __init__(
        self,
        notebook: Callable[[], Notebook],
        boot: str,
        cells: Callable[[], tuple[int | None, int | None]],
        notices: Callable[[Analysis], tuple[Notice, ...]] = lambda _: (),
        recall: Callable[[Analysis], None] = lambda _: None,
    ) -> None:
        self._notebook = notebook
        self._notices = notices
        self._recall = recall
        self._seen_passed: tuple[int, ...] = ()
        self._failing: int | None = None  # number of the last cell seen that ran out of memory and would again
        self._dismissed = frozenset[str]()  # keys of findings, notices and cards that are shown no longer
        self._changing = threading.Lock()  # around each change of `last`
        self._lifetimes = Lifetimes({})
        self._cells = cells
        self._boot = boot
        self._counters = Counters()
        self._seen = SeenMemory()
        self._is_taken_back = False
        self._was_beside = False
        self._has_other_error = False
        self._offered: TimedScan | None = None
        self._when_offered: Reading | None = None
        self.learners: dict[int, str] = {}
        self.last: MemoryState = MemoryState(boot=boot, heap=0, t=time.time(), seconds=0.0)
        self.look_for_ticks: LastLook = LastLook()
        self.rows: Rows | None = None
        self.analysis: Analysis | None = None

    @property
    def is_outdated(self) -> bool:
        """Say whether memory may have changed since the last scan, as far as counters and names tell.

        After a scan during a running cell it is, as that cell had memory in its hands that has names now. After a cell that
        raised an error it is, as that error may be of memory, and the last one's memory may be nobody's now. So it is where
        something was freed, though the same bytes may have been taken since.
        """
        if self._was_beside or self._has_other_error or self._is_taken_back or passed_run() != self._seen_passed:
            return True
        reading = self._counters.read()
        return reading is not None and self._seen.has_changed(reading, self._notebook())

    def look(self) -> bool:
        """Look at the heap; return whether it is another than before."""
        try:
            has_changed = self._look()
        except NoTorchError:
            return False
        return has_changed

    def note_error(self) -> None:
        """Note that a cell has raised an error, which may have changed no counter and no name."""
        self._has_other_error = True

    def confirm(self) -> None:
        """Note that the last state still holds after the cell that has just ended."""
        self.look_for_ticks = replace(self.look_for_ticks, cell=self._cells()[0])

    def _look(self) -> bool:
        scan, self._offered = self._offered, None
        notebook, before = self._notebook(), self._counters.read()
        bound, self._was_beside = bindings_of(notebook.namespace), notebook.is_running
        ended, running = self._cells()
        during = running if notebook.is_running else None
        if scan is None or not self._is_current(scan, notebook):
            scan = timed_scan(notebook)
        has_changed = self._take(scan, ended, during)
        self._has_other_error = False
        after = self._counters.read()  # now that the scan's own memory is given back
        self._seen = SeenMemory(after, names_of(scan.facts.graph), bound)
        self.look_for_ticks = LastLook(
            heap=self.last.heap, cell=self.last.cell, counted=_counted(before, after), limits=_limits(scan.analysis)
        )
        return has_changed

    def dismiss(self, key: str) -> None:
        """Show the finding, notice or card of a key no longer."""
        self._dismissed |= {key}

    def take_back(self) -> bool:
        """Remove dismissed or freed parts from the last state, without a scan; return whether there were any."""
        with self._changing:
            state = without(self.last, self._lifetimes.over() | self._dismissed)
            if state == self.last:
                return False
            self._is_taken_back = True
            self.last = replace(state, heap=state.heap + 1)
            self.look_for_ticks = replace(self.look_for_ticks, heap=self.last.heap)
            return True

    def offer(self, scan: TimedScan | None) -> None:
        """Have the next scan return this one, made for something else, unless memory changes until then. None takes it back."""
        self._offered, self._when_offered = scan, None if scan is None else self._counters.read()

    def _is_current(self, scan: TimedScan, notebook: Notebook) -> bool:
        reading = self._counters.read()
        return (
            scan.is_beside == notebook.is_running
            and reading is not None
            and not reading.differs(self._when_offered)
            and not is_rebound(names_of(scan.facts.graph), notebook.namespace)
        )

    def _take(self, scan: TimedScan, cell: int | None, during: int | None) -> bool:
        """Take a scan; return whether the state is another than before."""
        self.learners = names_of_learners(scan.facts)
        is_first, self.analysis = self.rows is None, scan.analysis
        self._recall(scan.analysis)
        self._seen_passed = passed_run()
        state, self.rows = build_memory_state(
            scan.analysis,
            self._boot,
            self.last.heap,
            t=scan.since,
            seconds=scan.seconds,
            cell=cell,
            during=during,
            over=self._cured(scan.analysis),
        )
        notices = self._notices(scan.analysis)
        state = replace(state, notices=notice_lines(notices))
        with self._changing:
            self._is_taken_back = False
            self._dismissed &= {one.key for one in (*state.findings, *state.notices, state.oom) if one is not None}
            state = replace(without(state, self._dismissed), heap=self.last.heap)
            is_same = replace(self.last, t=state.t, seconds=state.seconds, cell=cell) == state and not is_first
            self.last = state if is_same else replace(state, heap=state.heap + 1)
            self._lifetimes = Lifetimes.of(scan, self.rows, notices)
        return not is_same

    def _cured(self, analysis: Analysis) -> tuple[int | None, ...]:
        """Return the number of the cell that ran out of memory and was seen to lack it, if it has room now; else none."""
        card = analysis.once(build_card)
        if card is None:
            self._failing = None
        elif not is_cured(card):
            self._failing = card.asked.cell
        elif self._failing is not None and self._failing == card.asked.cell:
            return (self._failing,)
        return ()


def _counted(before: Reading | None, after: Reading | None) -> tuple[Counted, ...]:
    """Return the allocators' counters at a scan; if they changed meanwhile, counters that no reading is equal to."""
    if before is None or after is None or before.devices != after.devices or not after.devices:
        return _CHANGING
    return after.devices


def _limits(analysis: Analysis) -> dict[str, RequestLimits]:
    """Return the limits of the largest request by device, where no block waits for a stream: nothing counts the end of that."""
    return {device.name: device.limits for device in analysis.devices if device.facts.segments and not device.space.pending}
