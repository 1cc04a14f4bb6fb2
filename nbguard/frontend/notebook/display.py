"""Cards and lines that a session shows below a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbguard.frontend.notebook.bundle import display_bundle, line_bundle

if TYPE_CHECKING:
    from nbguard.memory.cleanup.plan.plan import Outcome
    from nbguard.memory.core.simulated import Simulated
    from nbguard.memory.reports.cell_ledger import CellRecord
    from nbguard.memory.reports.notices.notice import Notice
    from nbguard.render.result import Result


def show_card(card: Result) -> None:
    """Show a result as the notebook would."""
    display_bundle(card.mimebundle())


def show_sentence(sentence: str) -> None:
    """Show one line."""
    display_bundle(line_bundle(sentence))


def show_record(record: CellRecord) -> None:
    """Show what a cell changed, in a line."""
    from nbguard.memory.reports.cell_lines import cell_line

    show_sentence(cell_line(record))


def show_notice(notice: Notice) -> None:
    """Show what a cell left in memory, in a line."""
    from nbguard.memory.reports.notices.view import notice_line

    show_sentence(notice_line(notice))


def show_released(outcome: Outcome, cell: int) -> None:
    """Show what was released after a failed cell, in a line."""
    from nbguard.memory.reports.cell_lines import released_line

    show_sentence(released_line(outcome, cell))


def show_simulated(before: Simulated, after: Simulated, cell: int) -> None:
    """Show what a cell did to the simulated device, in a line."""
    from nbguard.memory.core.views.simulated import cell_line

    show_sentence(cell_line(before, after, cell))
