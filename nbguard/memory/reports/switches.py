"""The switches of `%nbguard`: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches(Result):
    """The state of `%nbguard`, that is, the features that run around the user's cells."""

    kind: ClassVar[str] = "switches"
    view: ClassVar[str] = "nbguard.memory.reports.history_view:switches_blocks"

    oom_card: bool  # the card after an out-of-memory error is on
    history: bool  # cells are recorded
    cells: bool  # each cell prints its line
    auto_clean_errors: bool  # memory that only an error holds is released by itself
    notices: bool = False  # leftovers of a cell are told in a line
    recorded: int = 0  # number of cells in the history
    sidebar: bool = False  # views are answered
    views: int = 0  # number of views that look now
    rate: float = 0.0  # messages to a view per second
    jobs: int = 0  # number of their jobs that wait
    assistants: bool = False  # assistants may look at this kernel
    compiled_walk: bool = False  # the compiled part walks the heap, and not Python
    why_pure: str = ""  # reason why Python does
