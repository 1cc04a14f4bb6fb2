"""The scan of the notebook after a cell, shared by all listeners that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbguard.memory.scan.scan import TimedScan


class CellScan:
    """Scans the notebook when the first listener asks for it, and hands the same scan to the others.

    It is for the listeners of one cell, between its end and the beginning of the next, and so is the analysis of the scan. A
    listener that changes the state itself hands in a scan made afterwards.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.last: TimedScan | None = None

    def get(self) -> TimedScan:
        """Return the scan of the state after the cell. Raises NoTorchError if PyTorch is not imported."""
        if self.last is None:
            from nbguard.memory.scan.scan import Notebook, timed_scan

            self.last = timed_scan(Notebook(self._shell, self._shell.user_ns))
        return self.last

    def replace(self, after: TimedScan) -> None:
        """Forget the scan so far: `after` was made since, when a listener had changed the state."""
        self.last = after
