"""The figures of the devices' memory that a log takes after each cell and while one runs, and the state of `%nbguard log`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.core.advice import LOG_OFF
from nbguard.memory.core.facts import DeviceFacts, Reading
from nbguard.memory.core.segments.fragmentation import fragmentation
from nbguard.memory.reports.cell_ledger import CellRecord
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.training.profiler.analysis.compare import Figure
from nbguard.units import counted


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
    view: ClassVar[str] = "nbguard.training.profiler.analysis.memory.cell_log:memory_log_blocks"
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
