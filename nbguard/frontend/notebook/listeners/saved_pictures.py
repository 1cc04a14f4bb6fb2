"""The pictures of shown sidebars, kept those of the last cell's end by the notebook's own means where no page does it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from nbguard.memory.cells.hooks import CellFact
from nbguard.memory.scan.devices.counters import Counters

if TYPE_CHECKING:
    from nbguard.memory.cells.hooks import CellScan
    from nbguard.memory.core.facts import Reading
    from nbguard.memory.reports.report import Report

_SHARE = 0.1
"""Of the time that new pictures may take: they are made only while no view is open, as when a notebook is run by nbconvert."""


class ShownSidebar(Protocol):
    """A sidebar in an output."""

    comm: Any  # None if it is closed

    def publish(self, picture: str, *, update: bool = False) -> None:
        """Put a picture, in HTML, into the outputs that show the sidebar."""


class SavedPictures:
    """Updates the outputs of `nbguard.Sidebar()` after a cell that has changed the memory, while no page shows any.

    Where one does, our extension asks for pictures itself, and any other page would draw the live view again.

    Args:
        is_watched: says whether a view looks.
        report: returns the report on the state after a cell.
    """

    name = "the picture of the sidebar"
    rank = 60

    def __init__(self, is_watched: Callable[[], bool], report: Callable[[CellScan], Report]) -> None:
        self._is_watched = is_watched
        self._report = report
        self._shown: weakref.WeakSet[ShownSidebar] = weakref.WeakSet()
        self._counters = Counters()
        self._seen: Reading | None = None
        self._due = 0.0  # on the clock of `time.perf_counter`: no picture is made before

    def keep(self, sidebar: ShownSidebar) -> None:
        """Keep the picture of a sidebar that has just been shown."""
        self._shown.add(sidebar)
        self._seen = self._counters.read()

    def before(self) -> None:
        """Do nothing, as the content of pictures is noted when they are made."""

    def after(self, cell: CellFact) -> None:
        """Update the pictures, if the memory has changed since they were made."""
        shown = [sidebar for sidebar in self._shown if sidebar.comm is not None]
        if not shown or self._is_watched() or time.perf_counter() < self._due:
            return
        reading = self._counters.read()
        if reading is not None and reading.differs(self._seen):
            start = time.perf_counter()
            self._update(shown, cell)
            self._seen, now = self._counters.read(), time.perf_counter()
            self._due = now + (now - start) * (1 / _SHARE - 1)

    def _update(self, shown: list[ShownSidebar], cell: CellFact) -> None:
        from nbguard.frontend.sidebar.memory_line import report_picture

        html = str(report_picture(self._report(cell.scan), cell.number, time.time()))
        for sidebar in shown:
            sidebar.publish(html, update=True)
