"""`%nbguard log`: the memory is written to logs of experiments after each cell, and to Prometheus' files while cells run."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nbguard.errors import NbguardError, in_one_line
from nbguard.memory.cells.hooks import CellFact
from nbguard.memory.cells.name_watch import Ledger
from nbguard.memory.scan.devices.counters import Counters
from nbguard.memory.scan.devices.cuda import device_facts, tracked_device
from nbguard.training.profiler.analysis.compare import Figure
from nbguard.training.profiler.analysis.memory.cell_log import MemoryLogState, cell_figures, reading_figures
from nbguard.training.profiler.sinks import open_sink
from nbguard.training.profiler.sinks.sink import Sink


class MemoryLog:
    """Writes the ledger's record of each cell. A log that fails is taken off, and `say` gets one sentence."""

    name = "the log of the memory"
    rank = 31  # right after the ledger

    def __init__(self, ledger: Ledger, specs: tuple[str, ...], every: float, say: Callable[[str], None]) -> None:
        """Open the logs.

        Raises:
            NbguardError: one of them cannot be written to; then none is open.
        """
        self._ledger = ledger
        self._say = say
        self._cells = 0
        self._failed: list[str] = []
        self._sinks = [open_sink(spec) for spec in specs]
        live = [sink for sink in self._sinks if sink.is_live]
        self._clock = _Clock(live, every) if live else None

    @property
    def state(self) -> MemoryLogState:
        """Return where it writes, and how much it has written."""
        return MemoryLogState(
            places=tuple(sink.place for sink in self._sinks),
            cells=self._cells,
            every=None if self._clock is None else self._clock.every,
            failed=tuple(self._failed),
        )

    def before(self) -> None:
        """Do nothing: the ledger reads the counters."""

    def after(self, cell: CellFact) -> None:
        """Write the figures of a cell, if the ledger has any; say what failed while it ran."""
        for sink, reason in self._clock.failures() if self._clock is not None else ():
            self._take_off(sink, reason)
        records = self._ledger.history.records
        if not records or records[-1].cell != cell.number:
            return
        figures = cell_figures(records[-1], _segments())
        self._cells += 1
        for sink in tuple(self._sinks):
            self._attempt(sink, lambda sink=sink: sink.log(f"In[{cell.number}]", figures))  # type: ignore[misc]

    def close(self) -> None:
        """Write no more, and close the logs."""
        if self._clock is not None:
            self._clock.stop()
        for sink in tuple(self._sinks):
            self._attempt(sink, sink.close)
        self._sinks = []

    def _attempt(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a log's library raises what it likes, and that is no matter of the cell
            self._take_off(sink, _reason(sink, error))

    def _take_off(self, sink: Sink, reason: str) -> None:
        """Write no more to a log, and say why, once."""
        if sink in self._sinks:
            self._sinks.remove(sink)
            self._failed.append(reason)
            self._say(f"nbguard: {reason}; this log is off")


def _reason(sink: Sink, error: Exception) -> str:
    """Return in one sentence why a log could not be written."""
    if isinstance(error, NbguardError):
        return str(error)
    return f"{sink.place} cannot be written ({in_one_line(error)})"


def _segments() -> Any:
    """Return the devices with their segments: read in milliseconds, where PyTorch has opened one that has any."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return ()
    tracked = tracked_device()
    if tracked == "cpu" or (tracked == "cuda" and not torch.cuda.is_initialized()):
        return ()
    return device_facts(tracked)[0]


class _Clock:
    """A thread that writes the counters to live logs now and then, also while a cell runs. It reads counters only."""

    def __init__(self, sinks: list[Sink], every: float) -> None:
        self.every = every
        self._sinks = sinks
        self._failed: deque[tuple[Sink, str]] = deque()
        self._counters = Counters()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbguard log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a file that is being written is finished first."""
        self._ends.set()
        self._thread.join()

    def failures(self) -> Iterator[tuple[Sink, str]]:
        """Yield the logs that have failed since the last time, each with the reason: a thread has no cell to say it in."""
        while self._failed:
            yield self._failed.popleft()

    def _run(self) -> None:
        while self._sinks and not self._ends.wait(self.every):
            try:
                reading = self._counters.read()  # once for all logs
                figures: tuple[Figure, ...] = () if reading is None else reading_figures(reading)
            except Exception as error:  # noqa: BLE001 - as below, of every log
                self._fail(self._sinks, error)
                return
            for sink in tuple(self._sinks) if figures else ():
                try:
                    sink.log("", figures)
                except Exception as error:  # noqa: BLE001 - it is said after the next cell, and the log is taken off
                    self._fail([sink], error)

    def _fail(self, sinks: Sequence[Sink], error: Exception) -> None:
        for sink in tuple(sinks):
            self._sinks.remove(sink)
            self._failed.append((sink, _reason(sink, error)))
