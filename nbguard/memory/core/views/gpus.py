"""The GPUs of this machine as blocks, a line for each, then the processes on them."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core.facts import ProcessFact
from nbguard.memory.core.gpus import GpuReading, Gpus
from nbguard.memory.core.processes import Judged
from nbguard.memory.core.views.processes import process_row
from nbguard.render.blocks import Block, Line, Section, Table, TableRow, Title
from nbguard.units import format_bytes

_NAMES = ("GPU", "name", "used", "free", "total")
_PROCESS_NAMES = ("GPU", "pid", "since", "notebook or command", "used", "")


def gpus_blocks(gpus: Gpus, limit: int = 0) -> Iterator[Block]:  # noqa: ARG001 - of every view
    """Yield the GPUs, then the processes on them."""
    if gpus.gpus:
        yield Section("GPUs", gpus.driver)
        yield Table(names=_NAMES, rows=tuple(map(_row, gpus.gpus)), figures=(2, 3, 4))
        if rows := tuple(_process_rows(gpus)):
            yield Section("Processes on them")
            yield Table(names=_PROCESS_NAMES, rows=rows, figures=(4,))
        else:
            yield Line("no process is on them that this user can see")
    if not gpus.gpus:
        yield Title("No NVIDIA GPU found on this machine", "strong")
    if gpus.unavailable:
        yield Line(gpus.unavailable)


def _process_rows(gpus: Gpus) -> Iterator[TableRow]:
    """Yield a row for each process on each GPU, the largest first, then for those that only keep a GPU open."""
    judged = {each.found.process.pid: each for each in gpus.processes}
    listed = set()
    for gpu in gpus.gpus:
        for process in sorted(gpu.processes, key=lambda process: -(process.used or 0)):
            listed.add(process.pid)
            used = "?" if process.used is None else format_bytes(process.used)
            since, who, judgement = _words_on(judged.get(process.pid), process)
            yield TableRow(cells=(str(gpu.index), str(process.pid), since, who, used, judgement))
    for each in gpus.processes:
        if each.found.process.pid not in listed:
            _, since, who, used, judgement = process_row(each).cells
            yield TableRow(cells=("?", str(each.found.process.pid), since.removeprefix("since "), who, used, judgement))


def _words_on(judged: Judged | None, process: ProcessFact) -> tuple[str, str, str]:
    """Return (since when it runs, whose it is, the judgement) of a process; it may be one that this user cannot see."""
    if judged is not None:
        _, since, who, _, judgement = process_row(judged).cells
        return since.removeprefix("since "), who, judgement
    if process.identity is not None:
        return "", process.identity.words, ""
    return "", "(not visible here)", ""


def _row(gpu: GpuReading) -> TableRow:
    name = gpu.name if gpu.capability is None else f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})"
    sizes = (gpu.used, gpu.total - gpu.used, gpu.total)
    return TableRow(cells=(str(gpu.index), name, *map(format_bytes, sizes)))
