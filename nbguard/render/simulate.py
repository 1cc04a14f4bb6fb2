"""The simulated device in words: what was switched on or off, and a line after each cell."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nbguard.memory.simulated import Simulated, SimulationState
from nbguard.render.ledger import signed
from nbguard.units import format_bytes


def state_text(state: SimulationState) -> str:
    """Return what is simulated, its figures and what is assumed, as text."""
    return "\n".join((state.words, *(f"  {line}" for line in _lines(state.figures))))


def state_html(state: SimulationState) -> str:
    """Return the same as HTML."""
    rows = "".join(f"<li>{escape(line)}</li>" for line in _lines(state.figures))
    return f'<div aria-label="simulated device"><b>{escape(state.words)}</b><ul>{rows}</ul></div>'


def cell_line(before: Simulated, after: Simulated, cell: int) -> str:
    """Return what a cell did to the simulated device."""
    head = f"In[{cell}]  simulated {format_bytes(after.capacity)}: allocated {signed(after.allocated - before.allocated)}"
    parts = [f"{head} → {format_bytes(after.allocated)}"]
    if after.peak_allocated > max(before.peak_allocated, after.allocated):
        parts.append(f"new peak {format_bytes(after.peak_allocated)}")
    reserved = f"reserved {format_bytes(after.reserved)}"
    if after.peak_reserved > after.reserved:
        reserved += f" (peak {format_bytes(after.peak_reserved)})"
    parts.append(reserved)
    if after.ooms > before.ooms:
        parts.append(f"ran out of memory {after.ooms - before.ooms}×: %gpumem oom")
    if after.broken and not before.broken:
        parts.append(after.broken)
    return " · ".join(parts)


def _lines(figures: Simulated) -> Iterator[str]:
    taken = f" · CUDA context {format_bytes(figures.context)}" if figures.context else ""
    yield f"PyTorch {figures.torch_version} · settings: {figures.settings or 'defaults'}{taken}"
    yield f"allocated {format_bytes(figures.allocated)} (peak {format_bytes(figures.peak_allocated)})"
    yield f"reserved {format_bytes(figures.reserved)} (peak {format_bytes(figures.peak_reserved)})"
    space = figures.fragmentation
    yield f"of it releasable {format_bytes(space.releasable)}, stranded {format_bytes(space.stranded)}"
    if figures.ooms:
        yield f"ran out of memory {figures.ooms}×"
    if figures.broken:
        yield figures.broken
    yield from (f"assumed: {text}" for text in figures.assumptions)
