"""The rank that failed first and its line, or the process that has their port, after a cell whose launch failed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbguard.memory.cells.hooks import CellFact
from nbguard.memory.core.advice import CHECK_LAUNCH
from nbguard.texts import Text, joined

if TYPE_CHECKING:
    from nbguard.training.ranks.analysis.launch_errors import LaunchErrors

_BUSY = re.compile(r"port: (\d+).*EADDRINUSE")


class LaunchWatch:
    """Hands the errors of the ranks of a launch to `show`, after the cell that has launched them. Others cost nothing."""

    name = "the errors of ranks"
    rank = 11

    def __init__(self, shell: Any, show: Callable[[LaunchErrors], None], say: Callable[[str], None]) -> None:
        """`show` takes the errors of ranks, `say` a sentence."""
        self._shell = shell
        self._show, self._say = show, say

    def before(self) -> None:
        """Do nothing, as an error itself tells its launcher."""

    def after(self, cell: CellFact) -> None:
        """Show the errors, if the cell's own is that of a launcher."""
        if not cell.raised or "torch.multiprocessing" not in sys.modules:
            return
        error = getattr(self._shell.last_execution_result, "error_in_exec", None)
        if error is None:
            return
        from nbguard.training.ranks.errors import errors_of

        launched = errors_of(error)
        port = _BUSY.search(str(error)) if launched is None and type(error).__name__ == "DistNetworkError" else None
        if launched is not None:
            self._show(launched)
        elif port is not None:
            self._say(_words(int(port[1])))


def _words(port: int) -> str:
    """Return that a port is taken, the process that has it if the system says so, and the remedy."""
    from nbguard.training.ranks.meeting_point import listener_at

    listener = listener_at(port)
    who = "" if listener is None else f": {listener.words} listens at it"
    other = Text(f'`notebook_launcher(train, use_port="{port + 1}")`')
    return joined(" · ", [Text(f"port {port} is in use{who}"), other, CHECK_LAUNCH.code + f" {CHECK_LAUNCH.effect}"])
