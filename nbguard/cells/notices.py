"""The listener that speaks up: after a cell, one line on what it has deleted, bound anew or piled up and is still in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nbguard.cells.left_behind import LeftBehind
from nbguard.reports.notices.notice import Notice, Notices, again
from nbguard.units import MiB

if TYPE_CHECKING:
    from nbguard.cells.cell_counters import CellCounters
    from nbguard.cells.hooks import CellFact
    from nbguard.cells.name_watch import NameWatch
    from nbguard.cells.repeats import Repeats
    from nbguard.reports.notices.notice import Departure
    from nbguard.scan.weak_holdings import WeakHoldings

_KEPT = 200
"""Notices that are remembered. The oldest are forgotten, and would be shown again."""
ALL = "*"
"""Stands among the quiet names for all of them."""


class NoticeWatch:
    """Shows a line after a cell that leaves something behind: once for each cause, until it changes.

    The heap is looked at when a name has gone whose memory, at least `least` bytes or a hundredth of all, is alive, when a cell
    that is run again has left more each time, and when counters say that a cell which failed or took its time has left more
    (`LeftBehind`). One scan is shared by all listeners. Before PyTorch is imported nothing is looked at.
    """

    name = "notices"
    rank = 40

    def __init__(self, shell: Any, show: Callable[[Notice], None], source: Callable[[], str], counters: CellCounters) -> None:
        self.least = MiB
        self._shell = shell
        self._show = show
        self._source = source
        self._watched: tuple[NameWatch, Repeats] | None = None  # None: no cell has been seen since PyTorch was imported
        self._made: dict[tuple[str, str], Notice] = {}
        self._left: dict[tuple[str, str], WeakHoldings] = {}  # what each of them is about
        self._quiet: set[str] = set()
        self._has_cleaned = False
        self._counters = counters
        self._left_behind = LeftBehind(counters)

    def made(self, *, on: bool) -> Notices:
        """Return all notices so far."""
        return Notices(notices=tuple(self._made.values()), on=on, quiet=tuple(sorted(self._quiet)))

    def current(self) -> tuple[Notice, ...]:
        """Return the notices on what is still there, the latest first, without those on quiet names."""
        is_quiet = self._quiet.intersection
        return tuple(
            notice
            for fingerprint, notice in reversed(list(self._made.items()))
            if fingerprint in self._left and self._left[fingerprint].is_alive and not is_quiet((ALL, *notice.names))
        )

    def be_quiet(self, *names: str) -> None:
        """Show no notices about these names; without any, none at all. They are made all the same."""
        self._quiet.update(names or (ALL,))

    def speak(self) -> None:
        """Show notices about all names again."""
        self._quiet.clear()

    def forget_names(self) -> None:
        """Forget what the names were bound to: cells that are not told of change it."""
        self._watched = None

    def expect_cleanup(self) -> None:
        """Make no notice of what the cell that runs deletes: a cleanup has said itself what it left."""
        self._has_cleaned = True

    def before(self) -> None:
        """Look at what the cell is about to delete or bind anew."""
        self._has_cleaned = False
        if "torch" not in sys.modules:
            return
        names, repeats = self._watched = self._watched or self._begin()
        self._left_behind.before()
        source = self._source()
        names.note(None)
        names.look_before(source)
        repeats.before(source)

    def _begin(self) -> tuple[NameWatch, Repeats]:
        from nbguard.cells.name_watch import NameWatch
        from nbguard.cells.repeats import Repeats
        from nbguard.scan.scan import Notebook

        return NameWatch(Notebook(self._shell, self._shell.user_ns)), Repeats(self._counters)

    def after(self, cell: CellFact) -> None:
        """Compare the names with those before it; where one has gone and its memory has not, see who holds it."""
        if self._watched is None:
            return
        names, repeats = self._watched
        least = self._left_behind.least(self.least)
        gone = list(names.departures(cell.number, least))
        names.note(cell.number)
        grows = repeats.after(least)
        if gone and not self._has_cleaned:
            for notice, holdings in self._judged(cell, gone, least):
                self._tell(notice)
                self._left[notice.fingerprint] = holdings
        if grows and (piled_up := repeats.judge(cell, least)) is not None:
            self._tell(piled_up)
        left = self._left_behind.after(cell, least)
        if left is not None and not self._has_cleaned:
            self._tell(left)

    def _judged(
        self, cell: CellFact, gone: list[tuple[Departure, WeakHoldings]], least: int
    ) -> Iterator[tuple[Notice, WeakHoldings]]:
        from nbguard.reports.notices.judge import judge_departure
        from nbguard.scan.objects.named_tensors import named_tensors

        analysis = cell.scan.get().analysis
        views = named_tensors(self._shell.user_ns)
        for departure, holdings in gone:
            notice = judge_departure(analysis, departure, least, views)
            if notice is not None:
                yield notice, holdings

    def _tell(self, notice: Notice) -> None:
        """Keep a notice; show it if its cause is new and its name not quiet."""
        former = self._made.pop(notice.fingerprint, None)
        self._made[notice.fingerprint] = notice if former is None else again(former, notice)
        while len(self._made) > _KEPT:
            oldest = next(iter(self._made))
            del self._made[oldest]
            self._left.pop(oldest, None)
        if former is None and not self._quiet & {notice.name, ALL}:
            self._show(notice)
