"""Rounds of an action, each followed by a scan for the memory that it leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.reports.notices.causes import HeldStorages, held_storages
from nbguard.memory.reports.notices.notice import StorageKey
from nbguard.memory.reports.notices.rounds import Garbage, RoundsReport, compare_rounds, garbage_of
from nbguard.memory.scan.pause import keep_garbage
from nbguard.memory.scan.scan import Notebook, scan


class Watch:
    """The rounds of one action so far. It refers to nothing of the user's."""

    def __init__(self, action: str) -> None:
        self.action = action
        self._held: list[HeldStorages] = []
        self._garbage: list[Garbage] = []
        self._last: Analysis | None = None
        self._lines: dict[StorageKey, str] = {}  # that allocated the storages at these addresses last

    def look(self) -> None:
        """Note the held bytes and those that only wait for the collector, and then have these collected."""
        self._last = scan(Notebook.current()).analysis
        self._held.append(held_storages(self._last))
        self._garbage.append(garbage_of(self._last))
        gc.collect()

    @contextmanager
    def round(self) -> Iterator[Watch]:
        """Note the held bytes before the first round and after this one, and the lines that allocate in it."""
        from nbguard.memory.scan.storage_events import AllocationLines

        if not self._held:
            self.look()
        with AllocationLines() as allocations:
            yield self
        with keep_garbage():
            self._lines |= allocations.lines
            self.look()

    @property
    def report(self) -> RoundsReport | None:
        """Return the report on the rounds' leftovers, or None before the end of the first."""
        return (
            None
            if self._last is None or len(self._held) < 2
            else compare_rounds(self.action, self._held, self._garbage[1:], self._last, self._lines)
        )


_watches: dict[str, Watch] = {}
_MOST = 20


@contextmanager
def watch(action: str) -> Iterator[Watch]:
    """Watch a block that is run again and again under one name: `with nbguard.watch("predict") as rounds: …`.

    `rounds.report` tells after each of them the memory that the rounds so far left, and its holders.

    Raises:
        NoTorchError: PyTorch is not imported yet.
    """
    watched = _watches.setdefault(action, Watch(action))
    while len(_watches) > _MOST:
        del _watches[next(iter(_watches))]
    with watched.round():
        yield watched
