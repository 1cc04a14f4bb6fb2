"""The record of each cell's changes of the memory: the ledger, the lines after the cells, and the logs that it feeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError
from nbguard.frontend.notebook.display import show_record, show_sentence

if TYPE_CHECKING:
    from nbguard.frontend.notebook.listeners.memory_log import MemoryLog, MemoryLogState
    from nbguard.memory.cells.hooks import Hooks
    from nbguard.memory.cells.name_watch import Ledger
    from nbguard.memory.reports.cell_ledger import History

_NOTHING_YET = (
    "nothing is recorded yet; `%nbguard on` records each cell's change of the memory, `%gpumem cells on` also shows "
    "it after each cell"
)


class CellRecording:
    """Runs the ledger while something needs it: `%nbguard on`, the lines after cells, or a log."""

    def __init__(self, shell: Any, hooks: Hooks) -> None:
        self._shell = shell
        self._hooks = hooks
        self._ledger: Ledger | None = None
        self._log: MemoryLog | None = None
        self._stays = False  # it was begun by `%nbguard on`, not for lines or logs

    @property
    def is_on(self) -> bool:
        """Say whether cells are recorded."""
        return self._ledger in self._hooks.listeners

    @property
    def shows(self) -> bool:
        """Say whether each cell gets a line."""
        return self.is_on and self._ledger is not None and self._ledger.shows

    @property
    def count(self) -> int:
        """Return how many cells have been recorded."""
        return 0 if self._ledger is None else len(self._ledger.history.records)

    @property
    def history(self) -> History:
        """Return the records, which stay when recording ends. NbguardError if nothing ever has."""
        if self._ledger is None:
            raise NbguardError(_NOTHING_YET)
        return self._ledger.history

    def start(self) -> None:
        """Record the cells from now on."""
        self._stays = True
        self._run(shows=self.shows)

    def end(self) -> None:
        """Close the logs and record no more. The records stay."""
        self._stays = False
        self.stop_logging()
        self._stop()

    def show_cells(self, *, on: bool) -> None:
        """Tell each cell's changes after it, or stop telling them."""
        if on or self._stays or self._log is not None:
            self._run(shows=on)
        else:
            self._stop()

    @property
    def log_state(self) -> MemoryLogState:
        """Return where the memory is logged."""
        from nbguard.frontend.notebook.listeners.memory_log import MemoryLogState

        return MemoryLogState() if self._log is None else self._log.state

    def log(self, specs: tuple[str, ...], every: float) -> MemoryLogState:
        """Write the memory to these logs after each cell from now on, in the place of those before.

        Raises:
            NbguardError: one of them cannot be written to; then nothing has changed.
        """
        from nbguard.frontend.notebook.listeners.memory_log import MemoryLog

        log = MemoryLog(self._made_ledger(), specs, every, show_sentence)
        shows = self.shows
        self.stop_logging()
        self._run(shows=shows)
        self._log = log
        self._hooks.add(log)
        return log.state

    def stop_logging(self) -> MemoryLogState:
        """Close the logs; the ledger goes on only where something else needs it."""
        if self._log is not None:
            self._log.close()
            self._hooks.remove(self._log)
            self._log = None
            if not self._stays and not self.shows:
                self._stop()
        return self.log_state

    def _made_ledger(self) -> Ledger:
        """Return the ledger, which need not run."""
        from nbguard.memory.cells.name_watch import Ledger

        self._ledger = self._ledger or Ledger(self._shell, show_record, self._hooks.counters)
        return self._ledger

    def _run(self, *, shows: bool) -> None:
        ledger = self._made_ledger()
        if not self.is_on:
            ledger.start(shows=shows)
            self._hooks.add(ledger)
        elif ledger.shows != shows:
            ledger.show_lines(on=shows)

    def _stop(self) -> None:
        if self._ledger is not None:
            self._hooks.remove(self._ledger)
