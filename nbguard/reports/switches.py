"""What `%nbguard` has on and off: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches(Result):
    """What runs around the user's cells. `recorded` is how many cells the history has.

    `sidebar` says whether views are answered; `views` look now, and are told `rate` times a second; `jobs` of theirs wait.
    """

    kind: ClassVar[str] = "switches"
    view: ClassVar[str] = "nbguard.reports.switches_view:switches_blocks"

    oom_card: bool
    history: bool
    cells: bool
    auto_clean_errors: bool
    recorded: int = 0
    sidebar: bool = False
    views: int = 0
    rate: float = 0.0
    jobs: int = 0
