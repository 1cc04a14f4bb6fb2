"""A device's memory during a fit, in words and figures. The categories add up to the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbguard.memory.core.facts import Unavailable
from nbguard.render.blocks import Bar, Block, FactLines, Listing, Picture, Slice, Table, TableRow
from nbguard.training.profiler.analysis.report import EpochRow, Growth, MemoryReport, PhasePeak, StackPeak
from nbguard.training.profiler.render.chart import memory_picture
from nbguard.units import counted, format_bytes, format_column, signed, unit_of

_COLOURS = {
    "parameters": "h0",
    "gradients": "h2",
    "optimizer state": "h4",
    "buffers": "h5",
    "inputs": "h1",
    "activations": "h3",
    "temporaries": "strand",
    "before the fit": "ctx",
    "beyond the recorded batch": "rel",
}
_SHOWN = 8


def memory_blocks(memory: MemoryReport | Unavailable | None, epochs: Sequence[EpochRow]) -> Iterator[Block]:
    """Yield peak, parts of it, growth and the lines behind it; `epochs` are ruled in the picture."""
    yield memory_line(memory)
    if memory is None or isinstance(memory, Unavailable):
        return
    if memory.categories:
        yield _categories(memory)
    rows = [("by phase", _phases(memory.phases))] if memory.phases else []
    rows += [("growth", _growth(memory.growth))] if memory.growth is not None and memory.growth.per_batch > 0 else []
    if rows:
        yield FactLines(tuple(rows))
    if len(memory.points) > 1:
        yield Picture(memory_picture(memory, epochs))
    if memory.stacks:
        yield _stacks(memory.stacks)
    if memory.notes:
        yield Listing(sentences=memory.notes)


def memory_line(memory: MemoryReport | Unavailable | None) -> FactLines:
    """Return the memory in a line: at most, before, after."""
    if memory is None or isinstance(memory, Unavailable):
        return FactLines((("memory", "not measured" if memory is None else f"not known: {memory.reason}"),))
    return FactLines((("memory", " · ".join(_peak(memory))),))


def _peak(memory: MemoryReport) -> Iterator[str]:
    peak = f"{memory.device} ({memory.source}): {format_bytes(memory.peak)} at most"
    if memory.capacity:
        peak += f" of {format_bytes(memory.capacity)} ({100 * memory.peak / memory.capacity:.1f} %)"
    yield peak + (f", in {memory.peak_phase}" if memory.peak_phase else "")
    if memory.peak_reserved is not None:
        yield f"reserved {format_bytes(memory.peak_reserved)} at most"
    yield f"{format_bytes(memory.start)} before, {format_bytes(memory.end)} after"
    if memory.growth is not None and memory.growth.per_batch <= 0 and not memory.growth.is_graph:
        yield f"no growth over {counted(memory.growth.batches, 'batch', 'batches')}"


def _categories(memory: MemoryReport) -> Bar:
    largest = sorted(memory.categories, key=lambda part: -part.nbytes)
    figures = format_column([part.nbytes for part in largest], unit_of(memory.peak))
    parts = zip(largest, figures, strict=True)
    slices = tuple(
        Slice(name=part.name, figure=figure, amount=part.nbytes, colour=_COLOURS.get(part.name, "other"))
        for part, figure in parts
    )
    return Bar(name="at the peak", slices=slices)


def _phases(peaks: Sequence[PhasePeak]) -> str:
    """Return the most that was allocated in each phase; of many, the highest."""
    highest = sorted(peaks, key=lambda peak: -peak.peak)[:_SHOWN]
    unit = unit_of(highest[0].peak)
    shown = [peak for peak in peaks if peak in highest]
    is_any_exact = any(peak.is_exact for peak in shown)
    ends = "" if is_any_exact else "at least, as only the ends of phases were seen: "
    mark = "≥ " if is_any_exact else ""  # of those that are not
    words = [f"{peak.phase} {'' if peak.is_exact else mark}{format_column([peak.peak], unit)[0]}" for peak in shown]
    words += [f"{len(peaks) - len(shown)} more, lower"] if len(peaks) > len(shown) else []
    legend = " (≥: only its ends were seen)" if is_any_exact and not all(peak.is_exact for peak in shown) else ""
    return ends + " · ".join(words) + legend


def _growth(growth: Growth) -> str:
    rate = f"{signed(growth.per_batch)} per batch over {counted(growth.batches, 'batch', 'batches')}"
    epoch = "" if growth.per_epoch is None else f", {signed(growth.per_epoch)} per epoch"
    name = f"`{growth.holder}{' → graph' if growth.is_graph else ''}`"
    holder = f"held by {name}" if growth.holder else "its holder is not known"
    if growth.holder and growth.held:
        holder = f"{name} holds {format_bytes(growth.held)} of it"
    return f"{rate}{epoch}: {holder}"


def _stacks(stacks: Sequence[StackPeak]) -> Table:
    largest = sorted(stacks, key=lambda stack: -stack.nbytes)
    shown, rest = largest[:_SHOWN], largest[_SHOWN:]
    nbytes = [stack.nbytes for stack in shown] + ([sum(stack.nbytes for stack in rest)] if rest else [])
    figures = format_column(nbytes, unit_of(max(nbytes)))
    rows = [TableRow(cells=(stack.category, figure, stack.site)) for stack, figure in zip(shown, figures, strict=False)]
    if rest:
        rows.append(TableRow(cells=("", figures[-1], f"{len(rest)} more lines")))
    return Table(names=("kind", "bytes", "allocated by"), rows=tuple(rows), figures=(1,))
