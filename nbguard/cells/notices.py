"""The listener that speaks up: after a cell, one line on what it has deleted, bound anew or piled up and is still in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.cells.left_behind import LeftBehind
from nbguard.reports.notices.notice import Notice, Notices, again, is_part_of
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
_MOST_TOLD = 20
"""Leaks of one cause that are remembered while they last."""
ALL = "*"
"""Stands among the quiet names for all of them."""
_Judged = tuple["Notice", "WeakHoldings"]
"""A notice on a name, and what tells later whether its memory is freed."""


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
        self._left: dict[tuple[str, str], list[_Judged]] = {}  # what each of them has been about, the latest last
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
            if any(holdings.is_alive for _, holdings in self._left.get(fingerprint, ())) and not is_quiet((ALL, *notice.names))
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
        piled_up = repeats.judge(cell, least) if grows else None
        of_names = list(self._judged(cell, gone, least)) if gone and not self._has_cleaned else []
        if piled_up is not None:
            of_names = self._piled_up(piled_up, of_names)
        for notice, holdings in of_names:
            self._tell(notice, self._known(notice))
            alive = [told for told in self._left.get(notice.fingerprint, ()) if told[1].is_alive]
            self._left[notice.fingerprint] = [*alive[-_MOST_TOLD:], (notice, holdings)]
        left = self._left_behind.after(cell, least)
        if left is not None and not self._has_cleaned:
            self._tell(left)

    def _judged(self, cell: CellFact, gone: list[tuple[Departure, WeakHoldings]], least: int) -> Iterator[_Judged]:
        from nbguard.reports.notices.judge import judge_departure
        from nbguard.scan.objects.named_tensors import named_tensors

        analysis = cell.scan.get().analysis
        views = named_tensors(self._shell.user_ns)
        for departure, holdings in sorted(gone, key=lambda one: -one[0].nbytes):  # the whole before its parts
            notice = judge_departure(analysis, departure, least, views)
            if notice is not None:
                yield notice, holdings

    def _known(self, notice: Notice) -> Notice | None:
        """Return the notice that has told of this one's memory and holders already, if there is one."""
        for fingerprint, told in self._left.items():
            for former, holdings in told:
                alive = {(fact.device, fact.address) for fact in holdings.alive()}
                if is_part_of(notice, replace(former, storages=former.storages & alive)):
                    return self._made[fingerprint]
        return None

    def _piled_up(self, growth: Notice, of_names: list[_Judged]) -> list[_Judged]:
        """Tell of what the cell piles up, and return the notices on names that are about something else.

        If one of those that are about the same has been told after an earlier run, that was enough.
        """
        parts = [notice for notice, _ in of_names if is_part_of(notice, growth)]
        self._tell(growth, next((self._made[part.fingerprint] for part in parts if part.fingerprint in self._made), None))
        names = (*self._made[growth.fingerprint].names, *(part.name for part in parts))
        self._made[growth.fingerprint] = replace(self._made[growth.fingerprint], names=tuple(dict.fromkeys(names)))
        return [(notice, holdings) for notice, holdings in of_names if notice not in parts]

    def _tell(self, notice: Notice, known: Notice | None = None) -> None:
        """Keep a notice; show it if its cause is new and its name not quiet. It takes the place of a `known` one."""
        former = self._made.pop(notice.fingerprint, None)
        if former is None and known is not None:
            former = self._made.pop(known.fingerprint)
            self._left[notice.fingerprint] = self._left.pop(known.fingerprint, [])
        self._made[notice.fingerprint] = notice if former is None else again(former, notice)
        while len(self._made) > _KEPT:
            oldest = next(iter(self._made))
            del self._made[oldest]
            self._left.pop(oldest, None)
        if former is None and not self._quiet & {notice.name, ALL}:
            self._show(notice)
