"""The state of `%nbguard log` as a result, and as it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.core.advice import LOG_OFF
from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLogState(Result):
    """The logs that the memory is written to after each cell."""

    kind: ClassVar[str] = "memory_log"
    view: ClassVar[str] = "nbguard.training.profiler.analysis.memory_log:memory_log_blocks"
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
