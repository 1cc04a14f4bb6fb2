"""`%nbguard log`: the memory is written to logs of experiments after each cell, and to Prometheus' files while cells run."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nbguard.errors import NbguardError, in_one_line
from nbguard.memory.cells.hooks import CellFact
from nbguard.memory.cells.name_watch import Ledger
from nbguard.memory.core.advice import LOG_OFF
from nbguard.memory.core.facts import DeviceFacts, Reading
from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.reports.cell_ledger import CellRecord
from nbguard.memory.scan.devices.counters import Counters
from nbguard.memory.scan.devices.cuda import device_facts, tracked_device
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.training.profiler.analysis.compare import Figure
from nbguard.training.profiler.sinks import Sink, open_sink
from nbguard.units import counted

# --- The figures of the devices' memory that a log takes after each cell and while one runs, and the state of `%nbguard log`


def cell_figures(record: CellRecord, devices: Iterable[DeviceFacts] = ()) -> tuple[Figure, ...]:
    """Return the figures of a cell that ended: the counters, and the cell's changes to them, by device.

    `devices`: with their segments, where these are known; only then there are stranded bytes and the largest free block.
    """
    return (*_changes(record), *_shares(record), *(figure for device in devices for figure in _free(device, record.cell)))


def reading_figures(reading: Reading) -> tuple[Figure, ...]:
    """Return the figures of the counters at a moment between two cells or in one."""
    return tuple(_counted(reading))


def _changes(record: CellRecord) -> Iterator[Figure]:
    for change in record.devices:
        known = {"cell_memory_change": change.delta, "cell_memory_peak": change.peak}
        yield from _known(_levels(change.after, change.reserved) | known, change.device, record.cell)


def _shares(record: CellRecord) -> Iterator[Figure]:
    """Yield the ledger of the cell: bytes that came, went and became stale, where the holders were scanned."""
    if record.unseen:
        return
    for name, shares in (("came", record.came), ("went", record.went), ("became_stale", record.stale)):
        for device in dict.fromkeys(share.device for share in shares):
            nbytes = sum(share.nbytes for share in shares if share.device == device)
            yield Figure(name=f"cell_memory_{name}", value=nbytes, unit="bytes", of=device, epoch=record.cell)


def _free(device: DeviceFacts, cell: int) -> Iterator[Figure]:
    if device.segments is not None:
        space = fragmentation(device.segments)
        known = {"memory_stranded": space.stranded, "memory_largest_free": space.largest_free}
        yield from _known(known, device.device, cell)


def _counted(reading: Reading) -> Iterator[Figure]:
    for device in reading.devices:
        yield from _known(_levels(device.allocated, device.reserved) | {"memory_highest": device.peak}, device.device, None)
    if reading.heap is not None:
        yield Figure(name="process_memory", value=reading.heap, unit="bytes")


def _levels(allocated: int, reserved: int | None) -> dict[str, int | None]:
    unused = None if reserved is None else reserved - allocated
    return {"memory_allocated": allocated, "memory_reserved": reserved, "memory_unused": unused}


def _known(values: Mapping[str, int | None], of: str, cell: int | None) -> Iterator[Figure]:
    for name, value in values.items():
        if value is not None:
            yield Figure(name=name, value=value, unit="bytes", of=of, epoch=cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLogState(Result):
    """The logs that the memory is written to after each cell."""

    kind: ClassVar[str] = "memory_log"
    view: ClassVar[str] = "nbguard.frontend.notebook.listeners.memory_log:memory_log_blocks"
    label: ClassVar[str] = "Log of the memory"

    places: tuple[str, ...] = ()  # where it is written; empty for nowhere
    cells: int = 0  # that have been written so far
    every: float | None = None  # seconds until files for Prometheus are written again; None without any
    failed: tuple[str, ...] = ()  # logs that could not be written to, and why: they are off


def memory_log_blocks(state: MemoryLogState) -> Iterator[Block]:
    """Yield where the memory is written, and how to end it."""
    if not state.places:
        yield Title("the memory is not logged")
    else:
        yield Title("the memory is logged after each cell", "strong")
        yield Table(rows=tuple(TableRow(cells=("to", place)) for place in state.places))
        live = "" if state.every is None else f"; files for Prometheus are also written every {state.every:g} s"
        yield Line(f"{counted(state.cells, 'cell')} written so far{live}. To end it: " + LOG_OFF.code, "dim")
    for failure in state.failed:
        yield Line(failure, "strong")


# --- memory log


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
