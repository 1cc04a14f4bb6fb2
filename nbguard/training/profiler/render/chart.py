"""Pictures of a fit, showing its memory over time with a batch in detail, or a step by phase, and the memory in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from nbguard.memory.core.facts import Unavailable
from nbguard.render.html import Bar, Block, FactLines, Listing, Picture, Slice, Table, TableRow, key
from nbguard.render.markup import Html, join
from nbguard.render.svg import LEFT, RIGHT, WIDTH, Scale, area, box, byte_grid, byte_step, drawing, line, short, words
from nbguard.training.profiler.analysis.report import (
    EpochRow,
    Group,
    Growth,
    MemoryPoint,
    MemoryReport,
    PhasePeak,
    StackPeak,
    TimeRow,
    Timing,
)
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import counted, format_bytes, format_column, format_time, re_adding, re_adding_times, signed, unit_of

# --- The time of a fit, in words and figures, by phases, steps, epochs. The figures shown add up to the wall time.


COLOURS = {
    phase_log.WAIT: "strand",
    phase_log.TO_DEVICE: "h1",
    phase_log.TRANSFORMS: "h3",
    phase_log.FORWARD: "h0",
    phase_log.LOSS: "rel",
    phase_log.BACKWARD: "h2",
    phase_log.STEP: "h4",
    phase_log.ZERO_GRAD: "h5",
}
"""The colour of a phase wherever it is drawn; all others share one."""
REST = "other"

_GROUPS: dict[Group, str] = {"batch": "training batches", "validation": "validation", "around": "around the batches"}
_BATCH: tuple[Group] = ("batch",)
_NAMES = ("where the time went", "total", "share", "batch median", "batch p95", "on the GPU")
_PHASES_SHOWN = 16
_EPOCHS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _Line:
    """A phase as shown: its total and its share are rounded so that they add up, in nanoseconds and in tenths of a percent."""

    row: TimeRow
    total: int
    tenths: int
    per_batch: tuple[str, str, str]


def time_blocks(timing: Timing) -> Iterator[Block]:
    """Yield the table of phases, small ones added up per group; then steps, epochs and the GPU."""
    yield replace(_phase_table(timing.rows, 0.001), brief=_phase_table(timing.rows, 0.01))
    yield FactLines(tuple(_facts(timing)))


def brief_time_blocks(timing: Timing) -> Iterator[Block]:
    """Yield a short table: phases of 5 % and more of a batch, the other groups as one row each; then steps and epochs.

    The row around the batches names so large a share of nbguard's own: without the profile it would not be there.
    """
    yield _phase_table(timing.rows, 0.05, parts_of=_BATCH)
    yield FactLines(tuple(fact for fact in _facts(timing) if fact[0] != "GPU" or timing.busy is not None))


def epoch_blocks(epochs: Sequence[EpochRow]) -> Iterator[Block]:
    """Yield the passes over the data, behind a fold, where there are several."""
    rows = [*_passes(epochs, is_training=True), *_passes(epochs, is_training=False)]
    if len(rows) > 1:
        yield Table(
            names=("pass over the data", "batches", "total", "waits for data"),
            rows=tuple(rows),
            figures=(1, 2, 3),
            fold="epoch by epoch",
            brief=FactLines(()),
        )


def _phase_table(time_rows: Sequence[TimeRow], smallest: float, parts_of: Collection[Group] = tuple(_GROUPS)) -> Table:
    wall = sum(row.total for row in time_rows)
    rows: list[TableRow] = []
    lines = _lines(time_rows, wall)
    for group, name in _GROUPS.items():
        mine = [line for line in lines if line.row.group == group and line.row.total]
        if mine and group in parts_of:
            rows += _group(name, mine, wall, smallest)
        elif mine:
            own = sum(line.row.total for line in mine if line.row.phase == phase_log.OWN)
            shown = f"{name} ({phase_log.OWN} {format_time(own)})" if own >= smallest * wall else name
            rows.append(_row(shown, mine, wall, "group"))
    return Table(names=_NAMES, rows=(*rows, _row("", lines, wall, "sum")), figures=range(1, len(_NAMES)))


def _lines(rows: Sequence[TimeRow], wall: int) -> list[_Line]:
    """Return phases as shown: of a step in the order of their run, then the others, largest first."""
    order = {phase: place for place, phase in enumerate(phase_log.STEP_PHASES)}
    rows = sorted(rows, key=lambda row: (order.get(row.phase, len(order)), -row.total))
    totals = [row.total for row in rows]
    tenths = re_adding(totals, 1000, wall) if wall else totals
    return list(map(_Line, rows, re_adding_times(totals), tenths, _per_batch(rows)))


def _per_batch(rows: Sequence[TimeRow]) -> list[tuple[str, str, str]]:
    """Return the time of each phase per batch, each column in one unit."""
    columns = []
    for name in ("median", "p95", "gpu"):
        values = [getattr(row, name) for row in rows]
        known = [value for value in values if value is not None]
        unknown = "not known" if known and name != "gpu" else ""
        shown = ["" if value is None else format_time(value, max(known)) for value in values]
        columns.append([text or (unknown if row.group == "batch" else "") for text, row in zip(shown, rows, strict=True)])
    return list(zip(*columns, strict=True))


def _group(name: str, lines: list[_Line], wall: int, smallest: float) -> Iterator[TableRow]:
    if len(lines) == 1:
        yield _row(f"{name}: {lines[0].row.phase}", lines, wall, "group")
        return
    yield _row(name, lines, wall, "group")
    largest = sorted(lines, key=lambda line: -line.row.total)[:_PHASES_SHOWN]
    few = [line for line in lines if line.row.total < smallest * wall or line not in largest]
    if few == lines:
        return
    merged = few if len(few) > 1 else []
    for timed in lines:
        if timed not in merged:
            yield _row(timed.row.phase, [timed], wall, "part")
    if merged:
        all_small = all(line.row.total < smallest * wall for line in merged)
        yield _row(f"{len(merged)} {f'below {100 * smallest:g} % each' if all_small else 'smaller'}", merged, wall, "part")


def _row(name: str, lines: Sequence[_Line], wall: int, kind: Literal["group", "part", "sum"]) -> TableRow:
    is_one = kind != "sum" and len(lines) == 1
    total, tenths = sum(line.total for line in lines), sum(line.tenths for line in lines)
    cells = (name, format_time(total, wall), _percent(tenths), *(lines[0].per_batch if is_one else ("", "", "")))
    colour = COLOURS.get(lines[0].row.phase, REST) if is_one else REST
    return TableRow(cells=cells, kind=kind, share=tenths / 1000 if kind == "part" or is_one else None, colour=colour)


def _percent(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10} %"


def _facts(timing: Timing) -> Iterator[tuple[str, str]]:
    yield "step", " · ".join(_step(timing))
    if timing.epochs:
        fits = f"in {timing.fits} fits: " if timing.fits > 1 else ""
        yield "epochs", fits + " · ".join(_epoch_rows(timing.epochs))
    if timing.busy is None and timing.busy_note:
        yield "GPU", f"utilization not known: {timing.busy_note}"
    elif timing.busy is not None:
        note = f" ({timing.busy_note})" if timing.busy_note else ""
        yield "GPU", f"busy for {100 * timing.busy:.1f} % of the steady state{note}"


def _step(timing: Timing) -> Iterator[str]:
    if timing.step is None:
        yield "not known, because there were too few batches"
    else:
        p95 = "" if timing.step_p95 is None else f", p95 {format_time(timing.step_p95)}"
        yield f"{format_time(timing.step)} (median{p95})"
    if timing.first is not None:
        yield f"the first {format_time(timing.first)}"
    if timing.warm_up:
        yield f"{counted(timing.warm_up, 'batch', 'batches')} of warm-up left out"


def _epoch_rows(epochs: Sequence[EpochRow]) -> Iterator[str]:
    """Yield how many passes over the data there were, how long they took, and how much of it was waiting."""
    for word, is_training in (("", True), ("validation ", False)):
        passes = [epoch for epoch in epochs if epoch.is_training == is_training]
        totals = sorted(epoch.total for epoch in passes)
        if passes:
            least, middle, most = map(format_time, (totals[0], round(median(totals)), totals[-1]))
            spread = f" ({least} to {most})" if least != most else ""
            batches = counted(sum(epoch.batches for epoch in passes), "batch", "batches")
            wait = 100 * sum(epoch.wait for epoch in passes) / (sum(totals) or 1)
            yield f"{word}{len(passes)} × {middle}{spread}, {batches}, {wait:.1f} % waiting for data"


def _passes(epochs: Sequence[EpochRow], *, is_training: bool) -> Iterator[TableRow]:
    """Yield a row per pass; of many, each row stands for a few in succession."""
    passes = [epoch for epoch in epochs if epoch.is_training == is_training]
    per_row = -(-len(passes) // _EPOCHS_SHOWN) or 1
    largest = max((sum(epoch.total for epoch in passes[at : at + per_row]) for at in range(0, len(passes), per_row)), default=0)
    for at in range(0, len(passes), per_row):
        group = passes[at : at + per_row]
        total, wait = sum(epoch.total for epoch in group), sum(epoch.wait for epoch in group)
        numbers = str(group[0].number) if len(group) == 1 else f"{group[0].number} to {group[-1].number}"
        yield TableRow(
            cells=(
                f"{'epoch' if is_training else 'validation'} {numbers}",
                f"{sum(epoch.batches for epoch in group):,}",
                format_time(total, largest),
                f"{100 * wait / (total or 1):.1f} %",
            )
        )


_HEIGHT, _TOP, _BOTTOM = 190, 18, 22
_MARGIN = "8px 0 2px"
_GAP, _CLOSE_UP = 26, 250
"""Pixels between the whole fit and the batch beside it, and the width of the batch."""
_FEW = 48
"""So many points are drawn each by itself, with its phase; of more there is an envelope, and a close-up of one batch."""
_FOLLOWED = 4
"""A batch with so many points is one whose phases can be drawn."""
_SMALL, _TINY = 0.2, 0.02
"""Shares of the height: changes within the first are hard to see; those within the second would be hard to label, too."""
_BUCKETS = 140
_RULED = 40
"""Most epochs with a line each."""
_APART = 56
"""Pixels between the labels of two epochs."""
_SECOND = 10**9


@dataclass(frozen=True, slots=True)
class _Panel:
    """Pixels of nanoseconds and of bytes."""

    x: Scale
    y: Scale

    @property
    def floor(self) -> float:
        return self.y(self.y.low)


def memory_picture(memory: MemoryReport, epochs: Sequence[EpochRow]) -> Html:
    """Return memory over time with its key; `epochs` whose start is known are ruled."""
    points, shown, notes = memory.points, memory.points, []
    y = Scale(*_span(points, memory.peak), _HEIGHT - _BOTTOM, _TOP)
    if len(points) <= _FEW:
        whole = _Panel(Scale(points[0].at, points[-1].at, LEFT, WIDTH - RIGHT), y)
        inside = list(_phases(whole, points))
    else:
        shown = _in_detail(points)
        notes.append("the whole fit: the least and the most that was seen at a time")
        right = WIDTH - RIGHT - (_CLOSE_UP + _GAP if shown else 0)
        whole = _Panel(Scale(0, points[-1].at, LEFT, right), y)
        inside = [*_envelope(whole, points), *(_close_up(shown, y) if shown else ())]
    notes += [f"begins at {short(y.low)}"] if y.low else []
    inside = [
        *byte_grid(y),
        *_peak(y, memory.peak),
        *inside,
        *_reserved(whole, points),
        *_epochs(whole, epochs),
        *_times(whole.x),
    ]
    wall = format_time(whole.x.high)
    label = f"Memory of {memory.device} over {wall}: {format_bytes(memory.peak)} at most; its figures are above"
    colours = {"reserved": "ctx"} if any(point.reserved for point in points) else {}
    colours |= _colours(point.phase for point in shown[1:])
    return join((drawing(label, _HEIGHT, inside, _MARGIN), _key(colours, " · ".join(notes))))


def _span(points: Sequence[MemoryPoint], peak: int) -> tuple[int, int]:
    """Return the bytes at the bottom and at the top: 0 at the bottom, unless the changes are a small part of the whole."""
    top = max(peak, *(max(point.allocated, point.reserved or 0) for point in points), 1)
    least = min(point.allocated for point in points)
    if not _TINY * top <= top - least <= _SMALL * top:
        return 0, top
    tick = byte_step(2 * (top - least))
    return max(0, (least // tick - 1) * tick), top


def _in_detail(points: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Return the points of one batch: of those followed phase by phase, the one that reached most; none if none was."""
    batches: dict[int, list[MemoryPoint]] = {}
    for point in points:
        batches.setdefault(point.batch, []).append(point)
    followed = [batch for batch in batches.values() if len(batch) >= _FOLLOWED]
    if not followed:
        return ()
    return tuple(max(followed, key=lambda batch: max(point.allocated for point in batch)))


def _peak(y: Scale, peak: int) -> Iterator[Html]:
    """Yield the line of the peak."""
    yield line(f"M{LEFT} {y(peak)}H{WIDTH - RIGHT}", "warn", dashes="3 3")
    yield words(WIDTH - RIGHT, y(peak) - 4, format_bytes(peak), anchor="end", colour="warn")


def _phases(panel: _Panel, points: Sequence[MemoryPoint]) -> Iterator[Html]:
    """Yield the allocated bytes from point to point, in the colour of the phase that went on."""
    base = panel.floor
    for before, after in pairwise(points):
        left, right = panel.x(before.at), panel.x(after.at)
        title = f"{after.phase}: {format_bytes(before.allocated)} → {format_bytes(after.allocated)}"
        path = f"M{left} {base}V{panel.y(before.allocated)}L{right} {panel.y(after.allocated)}V{base}Z"
        yield area(path, COLOURS.get(after.phase, REST), title=title)


def _envelope(panel: _Panel, points: Sequence[MemoryPoint]) -> Iterator[Html]:
    """Yield the least and the most that was allocated in each stretch of time."""
    start, end = panel.x.low, panel.x.high
    stretches: dict[int, list[int]] = {}
    for point in points:
        stretches.setdefault((point.at - start) * _BUCKETS // (end - start + 1), []).append(point.allocated)
    long = (end - start) / _BUCKETS
    places = [panel.x(start + round((number + 0.5) * long)) for number in stretches]
    high = [f"{x} {panel.y(max(values))}" for x, values in zip(places, stretches.values(), strict=True)]
    low = [f"{x} {panel.y(min(values))}" for x, values in zip(places, stretches.values(), strict=True)]
    base = panel.floor
    yield area(f"M{places[0]} {base}L{' '.join(low)}L{places[-1]} {base}Z", "used")
    yield area(f"M{' '.join(high)}L{' '.join(reversed(low))}Z", "used", opacity=".45")


def _close_up(points: Sequence[MemoryPoint], y: Scale) -> Iterator[Html]:
    panel = _Panel(Scale(points[0].at, points[-1].at, WIDTH - RIGHT - _CLOSE_UP, WIDTH - RIGHT), y)
    yield from _phases(panel, points)
    yield words(panel.x.start, 11, f"batch {points[-1].batch} in detail")
    yield words(panel.x.end, _HEIGHT - 6, format_time(panel.x.high - panel.x.low), anchor="end")


def _reserved(panel: _Panel, points: Sequence[MemoryPoint]) -> Iterator[Html]:
    """Yield the reserved bytes, a line that turns where they change; at one pixel it turns once, to the most."""
    highest: dict[int, float] = {}
    for point in points:
        if point.reserved:
            x, y = round(panel.x(point.at)), panel.y(point.reserved)
            highest[x] = min(y, highest.get(x, y))
    if highest:
        turns = [(x, y) for (_, before), (x, y) in pairwise(highest.items()) if y != before]
        first, y = next(iter(highest.items()))
        yield line(f"M{first} {y}{''.join(f'H{x}V{y}' for x, y in turns)}H{max(highest)}", "ctx", width=1.5)


def _epochs(panel: _Panel, epochs: Sequence[EpochRow]) -> Iterator[Html]:
    """Yield a line where an epoch begins, with its number where there is room."""
    starts = [(epoch.number, epoch.start) for epoch in epochs if epoch.is_training and epoch.start is not None]
    written = -float(WIDTH)
    for number, start in starts if 1 < len(starts) <= _RULED else ():
        x = panel.x(start)
        if start < panel.x.high:
            yield line(f"M{x} {_TOP}V{_HEIGHT - _BOTTOM}", "dim", opacity=".5")
        if x - written >= _APART and panel.x.end - x >= _APART:
            yield words(x + 3, 11, f"epoch {number}")
            written = x


def _times(x: Scale) -> Iterator[Html]:
    """Yield round times below the picture."""
    wall = x.high - x.low
    steps = [factor * 10**power for power in range(11) for factor in (1, 2, 5)]
    steps += [60 * _SECOND * factor for factor in (1, 2, 5, 10, 20, 30)] + [3600 * _SECOND * 2**n for n in range(10)]
    step = next(step for step in sorted(steps) if wall <= 5 * step)
    for at in range(0, wall + 1, step):
        text = format_time(at) if at else "0"
        for needless in (".00", ".0", " 00 s", " 00 min"):
            text = text.replace(needless, "")
        yield words(x(x.low + at), _HEIGHT - 6, text, anchor="middle")


def _key(colours: dict[str, str], note: str) -> Html:
    return key(*((colour, name, "") for name, colour in colours.items()), note=note)


def _colours(phases: Iterable[str]) -> dict[str, str]:
    return {phase if phase in COLOURS else "all else": COLOURS.get(phase, REST) for phase in phases}


def step_picture(rows: Sequence[TimeRow]) -> Html:
    """Return the phases of a batch side by side, each as wide as its median; nothing where no median is known."""
    known = [(row.phase, row.median) for row in rows if row.group == "batch" and row.median]
    if not known:
        return Html()
    whole = sum(usual for _, usual in known)
    inside, x = [], 0.0
    for phase, usual in known:
        wide = usual / whole * WIDTH
        title = f"{phase}: {format_time(usual)}"
        inside.append(box(round(x, 1), 0, f"{wide:.1f}", 22, COLOURS.get(phase, REST), title=title))
        x += wide
    label = f"A batch by phase, {format_time(whole)} by the medians of its phases; the table above has the figures"
    colours = _colours(phase for phase, _ in known)
    return join((drawing(label, 22, inside, _MARGIN), _key(colours, "a batch, by medians")))


# --- A device's memory during a fit, in words and figures. The categories add up to the peak.


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
    rows = [("by phase", _phases_of_memory(memory.phases))] if memory.phases else []
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
    return FactLines((("memory", " · ".join(_peak_of_memory(memory))),))


def _peak_of_memory(memory: MemoryReport) -> Iterator[str]:
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


def _phases_of_memory(peaks: Sequence[PhasePeak]) -> str:
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
    name = growth.holder if growth.root == "garbage" else f"`{growth.holder}{' → graph' if growth.is_graph else ''}`"
    holder = f"held by {name}" if growth.holder else "its holder is not known"
    if growth.holder and growth.held:
        holder = f"{name} {'hold' if growth.root == 'garbage' else 'holds'} {format_bytes(growth.held)} of it"
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
