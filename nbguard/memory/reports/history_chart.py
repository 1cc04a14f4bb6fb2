"""Memory over cells as a picture, with a bar per cell, the reserved bytes as a line, peaks as marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbguard.memory.reports.cell_ledger import CellRecord, DeviceChange
from nbguard.render.html import key
from nbguard.render.markup import Html, join
from nbguard.render.svg import LEFT, RIGHT, WIDTH, Scale, box, byte_grid, drawing, line, short, words
from nbguard.units import format_bytes, signed

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
