"""The GPUs of this machine as blocks, a line for each, then the processes on them."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core.gpus import GpuReading, Gpus
from nbguard.memory.core.views.processes import process_row
from nbguard.render.blocks import Block, Line, Section, Table, TableRow, Title
from nbguard.units import format_bytes

_NAMES = ("GPU", "name", "used", "free", "total")


def gpus_blocks(gpus: Gpus, limit: int = 0) -> Iterator[Block]:  # noqa: ARG001 - of every view
    """Yield the GPUs, then the processes on them."""
    if gpus.gpus:
        yield Section("GPUs", gpus.driver)
        yield Table(names=_NAMES, rows=tuple(map(_row, gpus.gpus)), figures=(2, 3, 4))
        if gpus.processes:
            yield Section("Processes on them")
            yield Table(rows=tuple(map(process_row, gpus.processes)), figures=(3,))
        else:
            yield Line("no process is on them that this user can see")
    if not gpus.gpus:
        yield Title("No NVIDIA GPU found on this machine", "strong")
    if gpus.unavailable:
        yield Line(gpus.unavailable)


def _row(gpu: GpuReading) -> TableRow:
    name = gpu.name if gpu.capability is None else f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})"
    sizes = (gpu.used, gpu.total - gpu.used, gpu.total)
    return TableRow(cells=(str(gpu.index), name, *map(format_bytes, sizes)))
