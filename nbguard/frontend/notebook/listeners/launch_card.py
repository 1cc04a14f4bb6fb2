"""The card after a cell whose launch of ranks failed: the first failed rank, its line, and the errors that came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbguard.memory.cells.hooks import CellFact

if TYPE_CHECKING:
    from nbguard.training.ranks.analysis.launch_errors import LaunchErrors


class LaunchWatch:
    """Hands the errors of the ranks of a launch to `show`, after the cell that has launched them. Others cost nothing."""

    name = "the errors of ranks"
    rank = 11

    def __init__(self, shell: Any, show: Callable[[LaunchErrors], None]) -> None:
        self._shell = shell
        self._show = show

    def before(self) -> None:
        """Do nothing, as an error itself tells its launcher."""

    def after(self, cell: CellFact) -> None:
        """Show the errors, if the cell's own is that of a launcher."""
        if not cell.raised or "torch.multiprocessing" not in sys.modules:
            return
        error = getattr(self._shell.last_execution_result, "error_in_exec", None)
        if error is None:
            return
        from nbguard.training.ranks.errors.launch_errors import errors_of

        launched = errors_of(error)
        if launched is not None:
            self._show(launched)
