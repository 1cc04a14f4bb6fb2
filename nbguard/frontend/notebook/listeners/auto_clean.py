"""Automatic cleaning after a cell that failed: memory that only its error still holds is let go of at once, on request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nbguard import api
from nbguard.memory.cells.hooks import CellFact
from nbguard.memory.cleanup.plan.plan import Outcome
from nbguard.memory.scan.scan import Notebook


class AutoClean:
    """Releases the memory of the last error after a cell that failed, and hands the outcome to `show`."""

    name = "cleaning after failed cells"
    rank = 20

    def __init__(self, shell: Any, show: Callable[[Outcome, int], None]) -> None:
        self._shell = shell
        self._show = show

    def before(self) -> None:
        """Nothing is to be done before a cell."""

    def after(self, cell: CellFact) -> None:
        """Clean, unless somebody is looking at the error: `%pdb on`, or a debugger that traces."""
        if not cell.raised or "torch" not in sys.modules or self._shell.call_pdb or _is_traced():
            return
        seen = cell.scan.get()
        cleaned = api.release_error_in(Notebook(shell=self._shell, namespace=self._shell.user_ns), seen)
        if cleaned is not None:
            cell.scan.replace(cleaned.after)
            self._show(cleaned.outcome, cell.number)


def _is_traced() -> bool:
    """Say whether a debugger is in force (an IDE's, JupyterLab's)."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return sys.gettrace() is not None or (monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None)
