"""The history of cells as blocks, per device a picture and the table of the cells that changed its memory, and the picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nbguard.memory.core import advice
from nbguard.memory.reports.cell_ledger import CellRecord, DeviceChange, History, shares_text
from nbguard.memory.reports.switches import Switches
from nbguard.render.html import Block, Picture, Section, Table, TableRow, Title, key
from nbguard.render.markup import Html, join
from nbguard.render.svg import LEFT, RIGHT, WIDTH, Scale, box, byte_grid, drawing, line, short, words
from nbguard.texts import BEHIND_MORE
from nbguard.units import counted, format_bytes, format_column, signed, unit_of

# --- The switches of `%nbguard` as blocks.


def switches_blocks(switches: Switches) -> Iterator[Block]:
    """Yield each switch: its name, on or off, and the command that changes it."""
    cells = f"{counted(switches.recorded, 'cell')} recorded: " + advice.HISTORY.command
    rows = (
        ("out-of-memory card", switches.oom_card, "" if switches.oom_card else advice.ON.command),
        ("notices", switches.notices, "" if switches.notices else advice.NOTICES_ON.command),
        ("history of cells", switches.history, cells if switches.history or switches.recorded else advice.ON.command),
        ("line after a cell", switches.cells, "" if switches.cells else advice.CELLS_ON.command),
        ("errors cleaned at once", switches.auto_clean_errors, advice.AUTO_CLEAN.command),
        ("sidebar", switches.sidebar, _audience(switches) if switches.sidebar else advice.ON.command),
        ("assistants", switches.assistants, advice.ASSISTANTS_OFF.command if switches.assistants else ""),
    )
    walk = ("heap walk", "C", "") if switches.compiled_walk else ("heap walk", "pure Python", _why_pure(switches))
    switched = (TableRow(cells=(name, "on" if on else "off", hint)) for name, on, hint in rows)
    yield Table(rows=(*switched, TableRow(cells=walk)))


def _why_pure(switches: Switches) -> str:
    return f"because {switches.why_pure}" if switches.why_pure else ""


def _audience(switches: Switches) -> str:
    """Return how many views of the sidebar are open, how often they are updated, and how many requests wait."""
    if not switches.views:
        return "no view is open: nothing runs"
    views = f"{counted(switches.views, 'view')} open, updated {switches.rate:.2g} times a second"
    return f"{views} · {counted(switches.jobs, 'request')} waiting" if switches.jobs else views


# --- Memory over cells as a picture, with a bar per cell, the reserved bytes as a line, peaks as marks.


_BARS = 120
"""At most so many bars: of more cells, each bar stands for a few, and shows their highest."""
_HEIGHT, _TOP, _BOTTOM = 200, 22, 32
_FLOOR = _HEIGHT - _BOTTOM
_NAMED = 4
_APART = 84
"""Pixels between two labels, so that they do not lie on one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    first: int  # number of the first cell that it stands for
    last: int  # number of the last one
    allocated: int  # bytes after the cell, the most of several
    reserved: int  # bytes, the most of several; 0 where they are not counted
    peak: int | None  # bytes, the most while one ran, where that is known
    delta: int  # bytes that came (negative: went), all together
    raised: bool  # whether a cell failed

    @property
    def cells(self) -> str:
        return f"In[{self.first}]" if self.first == self.last else f"In[{self.first}] to In[{self.last}]"

    @property
    def highest(self) -> int:
        return max(self.allocated, self.reserved, self.peak or 0)


@dataclass(frozen=True, slots=True)
class _Plot:
    """Pixels of bars by their numbers, and of bytes."""

    count: int
    y: Scale

    @property
    def pitch(self) -> float:
        return min(64.0, (WIDTH - LEFT - RIGHT) / self.count)

    def x(self, number: float) -> float:
        return round(LEFT + number * self.pitch, 1)


def history_chart(device: str, changes: Sequence[tuple[CellRecord, DeviceChange]]) -> Html:
    """Return the picture of one device with its key."""
    bars = list(_bars(changes))
    plot = _Plot(len(bars), Scale(0, max(1, *(bar.highest for bar in bars)), _FLOOR, _TOP))
    label = f"Memory on {device} after each cell, {bars[0].cells} to In[{bars[-1].last}]; the table below has the figures"
    inside = (
        *byte_grid(plot.y),
        *_shapes(plot, bars),
        *_reserved(plot, bars),
        *_numbers(plot, bars),
        *_labels(plot, bars),
    )
    return join((drawing(label, _HEIGHT, inside), _key(bars, len(changes))))


def _bars(changes: Sequence[tuple[CellRecord, DeviceChange]]) -> Iterator[_Bar]:
    step = -(-len(changes) // _BARS)
    for at in range(0, len(changes), step):
        group = changes[at : at + step]
        on_device = [change for _, change in group]
        yield _Bar(
            first=group[0][0].cell,
            last=group[-1][0].cell,
            allocated=max(change.after for change in on_device),
            reserved=max(change.reserved or 0 for change in on_device),
            peak=max((change.peak for change in on_device if change.peak is not None), default=None),
            delta=sum(change.delta for change in on_device),
            raised=any(record.raised for record, _ in group),
        )


def _shapes(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[Html]:
    wide = round(max(1.0, plot.pitch - (2 if plot.pitch > 6 else 0)), 1)
    for number, bar in enumerate(bars):
        x, y = plot.x(number), plot.y(bar.allocated)
        title = f"{bar.cells}: {signed(bar.delta)} → {format_bytes(bar.allocated)}{' · failed' if bar.raised else ''}"
        yield box(x, y, wide, round(_FLOOR - y, 1), "used", title=title)
        if bar.peak is not None and bar.peak > bar.allocated:
            title = f"{bar.cells}: new peak {format_bytes(bar.peak)}"
            yield line(f"M{x} {plot.y(bar.peak)}h{wide}", "strand", width=2.5, title=title)
        if bar.raised:
            yield words(round(x + wide / 2, 1), _FLOOR + 11, "×", anchor="middle", colour="warn")


def _reserved(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[Html]:
    if any(bar.reserved for bar in bars):
        steps = "".join(f"V{plot.y(bar.reserved)}H{plot.x(number + 1)}" for number, bar in enumerate(bars))
        yield line(f"M{LEFT} {plot.y(0)}{steps}", "ctx", width=1.5)


def _numbers(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[Html]:
    """Yield the numbers of cells under the bars, as many as there is room for."""
    every = max(1, round(48 / plot.pitch + 0.5))
    for number in range(0, len(bars), every):
        yield words(plot.x(number + 0.5), _HEIGHT - 6, f"{bars[number].first}", anchor="middle")


def _labels(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[Html]:
    """Yield the largest changes, written above their bars."""
    taken: list[float] = []
    for number, bar in sorted(enumerate(bars), key=lambda numbered: -abs(numbered[1].delta)):
        x = plot.x(number + 0.5)
        if len(taken) == _NAMED or abs(bar.delta) * 20 < plot.y.high:
            return
        if all(abs(x - other) >= _APART for other in taken):
            taken.append(x)
            near = [other for n, other in enumerate(bars) if abs(plot.x(n + 0.5) - x) <= _APART / 2]
            y = round(plot.y(max(other.highest for other in near)) - 6, 1)
            anchor = "start" if x < LEFT + _APART / 2 else "end" if x > WIDTH - _APART / 2 else "middle"
            yield words(x, y, short(bar.delta, signs=True), anchor=anchor, colour="ink")


def _key(bars: Sequence[_Bar], cells: int) -> Html:
    parts = {"allocated": "used"}
    if any(bar.reserved for bar in bars):
        parts["reserved"] = "ctx"
    if any(bar.peak is not None and bar.peak > bar.allocated for bar in bars):
        parts["new peak"] = "strand"
    notes = ["× failed"] if any(bar.raised for bar in bars) else []
    notes += [f"each bar: the highest of {-(-cells // _BARS)} cells"] if len(bars) < cells else []
    return key(*((colour, name, "") for name, colour in parts.items()), note=" · ".join(notes))


_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_WIDE = 72
_NAMES = ("", "change", "allocated", "reserved", "peak in it", "what")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One row of the table: its changes down the column add up to the last `allocated`."""

    cell: str  # its number, or words in place of one
    change: int  # bytes that came (negative: went)
    allocated: int | None  # bytes after it
    reserved: int | None = None  # bytes after it, where an allocator counts them
    peak: str = ""  # the most while the cell ran, in words
    what: str = ""  # the holders that came and went
    is_cell: bool = False  # a cell's own row


def history_blocks(history: History, limit: int = 12) -> Iterator[Block]:
    """Yield per device a sentence, a picture, and the last `limit` cells that changed its memory."""
    if not history.devices:
        yield Title("no cell has used memory on a device since recording began", "dim")
    for device in history.devices:
        changes = history.of(device)
        yield Section(device, figures=_summary(changes))
        yield Picture(history_chart(device, changes), (f"  {sparks([change.after for _, change in changes])}",))
        yield _table(_entries(changes, limit))


def _summary(changes: Sequence[tuple[CellRecord, DeviceChange]]) -> str:
    """Return the history of one device in a sentence."""
    first, (last, now) = changes[0][0], changes[-1]
    highest, cell = max((max(change.after, change.peak or 0), record.cell) for record, change in changes)
    cells = f"In[{first.cell}] to In[{last.cell}]" if len(changes) > 1 else f"In[{first.cell}]"
    return f"{cells} · now {format_bytes(now.after)} · highest known {format_bytes(highest)} (In[{cell}])"


def _entries(changes: Sequence[tuple[CellRecord, DeviceChange]], limit: int) -> Iterator[_Entry]:
    """Yield a device's rows: the bytes there were, the last `limit` cells that changed them, the bytes there are."""
    first, now = changes[0][1], changes[-1][1]
    changed = [(record, change) for record, change in changes if change.is_changed or record.stale]
    earlier, shown = changed[:-limit], changed[-limit:]
    before = first.before - first.between
    yield _Entry(cell=f"before In[{changes[0][0].cell}]", change=before, allocated=before)
    if earlier:
        total = sum(change.delta for _, change in earlier)
        cells = ("cell" if len(earlier) == 1 else "cells") + BEHIND_MORE
        yield _Entry(cell=f"{len(earlier)} earlier", change=total, allocated=earlier[-1][1].after, what=cells)
    for record, change in shown:
        yield _Entry(
            cell=f"In[{record.cell}]",
            change=change.delta,
            allocated=change.after,
            reserved=change.reserved,
            peak=_peak(change),
            what=_what(record),
            is_cell=True,
        )
    outside = now.after - before - sum(change.delta for _, change in changed)
    if outside:
        words = "by widgets' callbacks, threads, or before a cell began"
        yield _Entry(cell="outside cells", change=outside, allocated=None, what=words)
    yield _Entry(cell="now", change=now.after, allocated=now.after, reserved=now.reserved)


def _peak(change: DeviceChange) -> str:
    if change.peak is not None:
        return format_bytes(change.peak)
    return f"≤ {format_bytes(change.limit)}" if change.limit is not None else ""


def _what(record: CellRecord) -> str:
    words = ["failed"] if record.raised else []
    for word, shares in (("+", record.came), ("−", record.went), ("stale:", record.stale)):
        if text := shares_text(shares):
            words.append(f"{word} {text}")
    return " · ".join(words)


def _table(entries: Iterable[_Entry]) -> Table:
    """Return the table of a device; the changes add up to the last of `allocated`."""
    rows = tuple(entries)
    unit = unit_of(max(row.allocated or 0 for row in rows))
    of_changes = unit_of(max((abs(row.change) for row in rows if row.is_cell), default=unit[0]))
    changes = [figure.replace("-", "−") for figure in format_column([row.change for row in rows[:-1]], of_changes)]
    columns = (
        [row.cell for row in rows],
        [*_signed(changes, rows), ""],
        [_figure(row.allocated, unit) for row in rows],
        [_figure(row.reserved, unit) for row in rows],
        [row.peak for row in rows],
        [row.what for row in rows],
    )
    *above, last = zip(*columns, strict=True)
    shown = (*(TableRow(cells=cells) for cells in above), TableRow(cells=last, kind="sum"))
    return Table(names=_NAMES, rows=shown, figures=range(1, len(_NAMES) - 1))


def _signed(figures: Sequence[str], rows: Sequence[_Entry]) -> Iterator[str]:
    for place, (figure, row) in enumerate(zip(figures, rows, strict=False)):
        yield f"+{figure}" if row.change > 0 and place else figure


def _figure(value: int | None, unit: tuple[int, str]) -> str:
    return "" if value is None else format_column([value], unit)[0]


def sparks(values: Sequence[int]) -> str:
    """Return bytes over cells as a line of blocks; of many cells, each block is the highest of a few."""
    step = -(-len(values) // _SPARKS_WIDE)
    highest = max(values) or 1
    tops = [max(values[at : at + step]) for at in range(0, len(values), step)]
    return "".join(_SPARKS[min(7, top * 8 // highest)] if top else " " for top in tops)
