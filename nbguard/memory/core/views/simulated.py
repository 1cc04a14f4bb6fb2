"""The simulated device in words, as blocks of its state, and a line after each cell."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core import advice
from nbguard.memory.core.simulated import Simulated, SimulationState, assumptions_line
from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.texts import joined
from nbguard.units import format_bytes, signed


def state_blocks(state: SimulationState, *, whole: bool = False) -> Iterator[Block]:
    """Yield whether a device is simulated, its figures, and how many assumptions they rest on; these too if `whole`."""
    yield Title(state.words, "strong")
    yield from map(Line, _sentences(state.figures))
    rows = tuple(TableRow(cells=(f"assumed: {text}",)) for text in state.figures.assumptions)
    line = assumptions_line(len(rows))
    yield Table(rows=rows, fold=line.replace("`", ""), brief=None if whole else Line(line, "dim"))


def _sentences(figures: Simulated) -> Iterator[str]:
    context = f" · CUDA context {format_bytes(figures.context)}" if figures.context else ""
    yield f"PyTorch {figures.torch_version} · settings: {figures.settings or 'defaults'}{context}"
    yield f"allocated {format_bytes(figures.allocated)} (peak {format_bytes(figures.peak_allocated)})"
    yield f"reserved {format_bytes(figures.reserved)} (peak {format_bytes(figures.peak_reserved)})"
    space = figures.fragmentation
    yield f"releasable {format_bytes(space.releasable)}, stranded {format_bytes(space.stranded)}"
    if figures.ooms:
        yield f"ran out of memory {figures.ooms}×"
    if figures.broken:
        yield figures.broken


def cell_line(before: Simulated, after: Simulated, cell: int) -> str:
    """Return the changes of a cell to the simulated device in one line."""
    head = f"In[{cell}]  simulated {format_bytes(after.capacity)}: allocated {signed(after.allocated - before.allocated)}"
    parts = [f"{head} → {format_bytes(after.allocated)}"]
    if after.peak_allocated > max(before.peak_allocated, after.allocated):
        parts.append(f"new peak {format_bytes(after.peak_allocated)}")
    reserved = f"reserved {format_bytes(after.reserved)}"
    if after.peak_reserved > after.reserved:
        reserved += f" (peak {format_bytes(after.peak_reserved)})"
    parts.append(reserved)
    if after.ooms > before.ooms:
        parts.append(f"ran out of memory {after.ooms - before.ooms}×: " + advice.OOM.command)
    if after.broken and not before.broken:
        parts.append(after.broken)
    return joined(" · ", parts)
