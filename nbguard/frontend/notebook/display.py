"""Cards, lines and mimebundles that a session shows below a cell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nbguard.render.markup import tag
from nbguard.texts import printable, running_shell

if TYPE_CHECKING:
    from nbguard.memory.cleanup.plan.plan import Outcome
    from nbguard.memory.core.simulated import Simulated
    from nbguard.memory.reports.cell_ledger import CellRecord
    from nbguard.memory.reports.notices.notice import Notice
    from nbguard.render.result import Result


# --- Mimebundles under the running cell, those of single lines, and a line of progress whose place a result takes.


_STYLE = "font-size:12px;line-height:1.45;color:var(--jp-ui-font-color2,#767676);font-variant-numeric:tabular-nums"


def line_bundle(sentence: str) -> dict[str, str]:
    """Return a line as text and as small HTML, without the style sheet of a report: there is one under every cell."""
    return {"text/plain": printable(sentence), "text/html": str(tag("div", sentence, style=_STYLE))}


class ProgressLine:
    """A line under the running cell that says how far something is. A terminal writes over it; in a notebook a result follows.

    A notebook keeps each output of a cell: a line on standard error, though overwritten with blanks, would stay as a red bar.
    So would it in a file that standard error goes to, where nothing can be written over.
    """

    free: tuple[int, Any] | None = None
    """The cell and the display whose line has done its work: the cell's next result takes its place."""

    def __init__(self) -> None:
        self._shell = running_shell()
        self._display: Any = None
        self._width = 0

    def say(self, words: str) -> None:
        """Show the line, or show it again."""
        if not hasattr(self._shell, "kernel"):
            if not getattr(sys.stderr, "isatty", bool)():
                return
            self._width = max(self._width, len(words))
            sys.stderr.write(f"\r{words}")
            sys.stderr.flush()
        elif self._display is None:
            self._display = _taken() or _new_display()
        if self._display is not None:
            self._display.update(line_bundle(words), raw=True)

    def end(self) -> None:
        """Take the line away."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
        if self._display is not None:
            self._display.update({"text/plain": ""}, raw=True)
            ProgressLine.free = (self._shell.execution_count, self._display)


def _new_display() -> Any:
    from IPython.display import display

    return display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]


def _taken() -> Any:
    """Return the display that an earlier line of progress of this cell left free, and take it; None if there is none."""
    (cell, place), ProgressLine.free = ProgressLine.free or (None, None), None
    return place if cell == getattr(running_shell(), "execution_count", None) else None


def display_bundle(bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Display a mimebundle under the running cell; the notebook keeps the `metadata` with the output."""
    from IPython.display import display

    place = _taken()
    show = display if place is None else place.update
    show(bundle, raw=True, metadata=metadata or None)


def show_card(card: Result) -> None:
    """Show a result as the notebook would."""
    display_bundle(card.mimebundle())


def show_sentence(sentence: str) -> None:
    """Show one line."""
    display_bundle(line_bundle(sentence))


def show_record(record: CellRecord) -> None:
    """Show what a cell changed, in a line."""
    from nbguard.memory.reports.cell_ledger import cell_line

    show_sentence(cell_line(record))


def show_notice(notice: Notice) -> None:
    """Show what a cell left in memory, in a line."""
    from nbguard.memory.reports.notices.view import notice_line

    show_sentence(notice_line(notice))


def show_released(outcome: Outcome, cell: int) -> None:
    """Show what was released after a failed cell, in a line."""
    from nbguard.memory.reports.cell_ledger import released_line

    show_sentence(released_line(outcome, cell))


def show_simulated(before: Simulated, after: Simulated, cell: int) -> None:
    """Show what a cell did to the simulated device, in a line."""
    from nbguard.memory.core.device_view import cell_line

    show_sentence(cell_line(before, after, cell))
