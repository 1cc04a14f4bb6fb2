"""The listener that tells after a cell, in one line, of objects deleted, bound again or piled up yet still in memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.units import MiB

if TYPE_CHECKING:
    from nbguard.memory.cells.hooks import CellCounters, CellFact
    from nbguard.memory.cells.name_watch import NameWatch
    from nbguard.memory.cells.repeats import Repeats
    from nbguard.memory.cells.told import ToldNotices
    from nbguard.memory.cleanup.apply.released_names import ReleasedName
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.core.facts import Reading
    from nbguard.memory.core.references.explain import Why
    from nbguard.memory.reports.notices.causes import HeldStorages
    from nbguard.memory.reports.notices.notice import Departure, Notice, Notices, StorageKey
    from nbguard.memory.scan.weak_holdings import WeakHoldings

# --- Memory that a cell leaves without a name, read from counters after a cell that failed or took its time, then scanned.


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
        from nbguard.memory.reports.notices.causes import held_storages
        from nbguard.memory.reports.notices.rounds import diagnose_left

        start = time.perf_counter()
        analysis = cell.scan.get().analysis
        notice = diagnose_left(analysis, cell.number, self._held, least, raised=cell.raised)
        self._held = analysis.once(held_storages)
        self._held_bytes = sum(nbytes for nbytes, _ in self._held.values())
        self._reading = self._counters.read_now()  # leftovers of the scan itself on the heap are nobody's
        self._looked = time.perf_counter()
        self._seconds = self._looked - start
        return notice


ALL = "*"
"""Stands among the quiet names for all of them."""


class NoticeWatch:
    """Shows a line after a cell that leaves something behind, one for each event, and the next accident is as loud.

    The heap is scanned when a name is gone whose memory, at least `least` bytes or a hundredth of all, is alive, when a cell
    that is run again left more each time, and when counters say that a cell which failed or took its time left more
    (`LeftBehind`). One scan is shared by all listeners. Before PyTorch is imported nothing is scanned.
    """

    name = "notices"
    rank = 40

    def __init__(self, shell: Any, show: Callable[[Notice], None], source: Callable[[], str], counters: CellCounters) -> None:
        self.least: int = MiB
        self._shell = shell
        self._show = show
        self._source = source
        self._watched: tuple[NameWatch, Repeats] | None = None  # None if no cell has been seen since PyTorch was imported
        self._told: ToldNotices | None = None  # None if nothing has been noticed yet
        self._quiet: set[str] = set()
        self._has_cleaned = False
        self._is_in_cell = False
        self._counters = counters
        self._left_behind = LeftBehind(counters)

    def made(self, *, on: bool) -> Notices:
        """Return all notices so far, as they hold now; the heap is scanned if memory that one is about is alive."""
        from nbguard.memory.reports.notices.notice import Notices

        told = self._told
        analysis = self._scan() if told is not None and told.may_have_changed else None
        notices = () if told is None else tuple(notice for notice, _ in self._as_of(told, analysis))
        return Notices(notices=notices, on=on, quiet=tuple(sorted(self._quiet)))

    def current(self, analysis: Analysis) -> tuple[Notice, ...]:
        """Return the notices on names that hold by a scan made now, the latest first, without those on quiet names."""
        if self._told is None or not self._told.may_have_changed:
            return ()
        is_quiet = self._quiet.intersection
        made = [notice for notice, is_of_names in self._as_of(self._told, analysis) if is_of_names and notice.is_left]
        return tuple(notice for notice in reversed(made) if not is_quiet((ALL, *notice.names)))

    def why(self, name: str) -> Why | None:
        """Return the remains of the object that a deleted name was bound to, or None if it is unknown."""
        from nbguard.memory.reports.notices.causes import explain_departure

        gone = None if self._watched is None else self._watched[0].deleted(name)
        return None if gone is None else explain_departure(self._scan(), gone, self._views())

    def _as_of(self, told: ToldNotices, analysis: Analysis | None) -> Iterator[tuple[Notice, bool]]:
        views = self._views() if analysis is not None else {}
        return told.as_of(analysis, self._left_behind.least(self.least), views)

    def _scan(self) -> Analysis:
        from nbguard.memory.scan.scan import Notebook, scan

        return scan(Notebook(shell=self._shell, namespace=self._shell.user_ns)).analysis

    def _views(self) -> dict[str, int]:

        return named_tensors(self._shell.user_ns)

    def be_quiet(self, *names: str) -> None:
        """Show no notices about these names; without any, none at all. They are made all the same."""
        self._quiet.update(names or (ALL,))

    def speak(self) -> None:
        """Show notices about all names again."""
        self._quiet.clear()

    def forget_names(self) -> None:
        """Forget the objects of the names, since unseen cells may change them."""
        self._watched = None

    def expect_cleanup(self) -> None:
        """Make no notice of names that the current cell deletes, since a cleanup told its leftovers itself."""
        self._has_cleaned = True

    def release(self, released: ReleasedName) -> None:
        """Take note of a name that a cleanup has deleted, so that `why` can be asked of it."""
        if self._watched is not None:
            self._watched[0].release(released, is_between_cells=not self._is_in_cell)

    def before(self) -> None:
        """Scan the objects that the cell is about to delete or bind again."""
        self._has_cleaned, self._is_in_cell = False, True
        if "torch" not in sys.modules:
            return
        names, repeats = self._watched = self._watched or self._begin()
        self._left_behind.before()
        source = self._source()
        names.note(None)
        names.look_before(source)
        repeats.before(source)

    def _begin(self) -> tuple[NameWatch, Repeats]:
        from nbguard.memory.cells.name_watch import NameWatch
        from nbguard.memory.cells.repeats import Repeats
        from nbguard.memory.scan.scan import Notebook

        return NameWatch(Notebook(shell=self._shell, namespace=self._shell.user_ns)), Repeats(self._counters)

    def after(self, cell: CellFact) -> None:
        """Compare the names with those before it; where one has gone and its memory has not, see who holds it."""
        self._is_in_cell = False
        if self._watched is None:
            return
        names, repeats = self._watched
        least = self._left_behind.least(self.least)
        gone = dict(names.departures(cell.number, least))
        names.note(cell.number)
        grows = repeats.after(least)
        growth = repeats.diagnose(cell, least) if grows else None
        told: list[Notice] = []
        if gone and not self._has_cleaned:
            told = self._of_names(cell, gone, growth, least)
        elif growth is not None:
            self._tell(cell, growth)
        left = self._left_behind.after(cell, least)
        if left is not None and not self._has_cleaned and not _is_told(left, told):
            self._tell(cell, left)

    def _of_names(
        self, cell: CellFact, gone: Mapping[Departure, WeakHoldings], growth: Notice | None, least: int
    ) -> list[Notice]:
        """Tell of the names that are gone, those that are about the cell's growth in the notice on that; return the others."""
        from nbguard.memory.reports.notices.causes import diagnose_departures
        from nbguard.memory.reports.notices.notice import is_part_of

        made = list(diagnose_departures(cell.scan.get().analysis, gone, least, self._views()))
        if growth is not None:
            parts = [notice for notice, _ in made if is_part_of(notice, growth)]
            names = (name for notice in (*parts, growth) for name in notice.names)
            self._tell(cell, replace(growth, names=tuple(dict.fromkeys(names))))
            made = [(notice, departures) for notice, departures in made if notice not in parts]
        for notice, departures in made:
            weak = ((fact.key, ref) for one in departures for fact, ref in gone[one].storages)
            self._keep(notice, weak, departures)
        return [notice for notice, _ in made]

    def _tell(self, cell: CellFact, notice: Notice) -> None:
        """Tell of the cell's leftovers, by the weak references of the scan that saw them."""
        scan = cell.scan.get()
        storages = zip(scan.facts.graph.storages, scan.tracker.storages, strict=True)
        self._keep(notice, ((fact.key, ref) for fact, ref in storages))

    def _keep(self, notice: Notice, weak: Iterable[tuple[StorageKey, Any]], departures: tuple[Departure, ...] = ()) -> None:
        """Keep a notice, and show it if it is news and its names are not quiet."""
        if self._told is None:
            from nbguard.memory.cells.told import ToldNotices

            self._told = ToldNotices()
        if departures and self._told.has_told(notice):
            return
        if self._told.tell(notice, weak, departures) and not self._quiet & {notice.name, *notice.beside, ALL}:
            self._show(notice)


def _is_told(left: Notice, told: Iterable[Notice]) -> bool:
    """Say whether the notices on a cell's names already cover its leftovers."""
    if not told:
        return False
    from nbguard.memory.reports.notices.notice import is_part_of

    return any(is_part_of(left, notice) for notice in told)


# --- The bytes of the tensors that names are bound to, without those of their storages that they do not show.


def named_tensors(namespace: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each plain tensor with a name; one of a subclass is not asked, which may run code of the user's."""
    torch: Any = sys.modules["torch"]
    return {
        name: value.numel() * value.element_size()
        for name, value in list(namespace.items())
        if type(value) is torch.Tensor and value.layout is torch.strided
    }
