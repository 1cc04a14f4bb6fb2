"""Memory over cells as a picture: a bar per cell, what the allocator reserved as a line, peaks as marks. Inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from nbguard.render.ledger import signed
from nbguard.reports.cell_ledger import CellRecord, DeviceChange
from nbguard.units import format_bytes, unit_of

_BARS = 120
"""At most so many bars: of more cells, each bar stands for a few, and shows their highest."""
_WIDTH, _HEIGHT = 860, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 8, 22, 32
_NAMED = 4
_APART = 84
"""Pixels between two labels, so that they do not lie on one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    first: int
    last: int
    allocated: int
    reserved: int
    peak: int | None
    delta: int
    raised: bool

    @property
    def cells(self) -> str:
        return f"In[{self.first}]" if self.first == self.last else f"In[{self.first}] to In[{self.last}]"


def chart(device: str, found: Sequence[tuple[CellRecord, DeviceChange]]) -> str:
    """Return the picture of one device with its key."""
    bars = list(_bars(found))
    tick, top = scale(max(max(bar.allocated, bar.reserved, bar.peak or 0) for bar in bars))
    plot = _Plot(len(bars), top)
    label = escape(
        f"Memory on {device} after each cell, {bars[0].cells} to In[{bars[-1].last}]; the table below has the figures"
    )
    inside = "".join(
        [*_grid(plot, tick), *_shapes(plot, bars), *_reserved(plot, bars), *_numbers(plot, bars), *_labels(plot, bars)]
    )
    svg = (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;height:auto;display:block;font-size:11px;fill:var(--dim)">{inside}</svg>'
    )
    return svg + _key(bars, found)


def _bars(found: Sequence[tuple[CellRecord, DeviceChange]]) -> Iterator[_Bar]:
    step = -(-len(found) // _BARS)
    for at in range(0, len(found), step):
        group = found[at : at + step]
        changes = [each for _, each in group]
        yield _Bar(
            first=group[0][0].cell,
            last=group[-1][0].cell,
            allocated=max(each.after for each in changes),
            reserved=max(each.reserved or 0 for each in changes),
            peak=max((each.peak for each in changes if each.peak is not None), default=None),
            delta=sum(each.delta for each in changes),
            raised=any(record.raised for record, _ in group),
        )


def scale(highest: int) -> tuple[int, int]:
    """Return (bytes between two lines of the grid, bytes at the top): round numbers, four lines at most."""
    size, _ = unit_of(max(highest, 1))
    steps = (factor * 10**power * size for power in range(4) for factor in (1, 2, 5))
    return next(step for step in steps if highest <= 4 * step), max(highest, 1)


@dataclass(frozen=True, slots=True)
class _Plot:
    """Where things go: from numbers of bars and bytes to pixels."""

    count: int
    top: int

    @property
    def pitch(self) -> float:
        return min(64.0, (_WIDTH - _LEFT - _RIGHT) / self.count)

    def x(self, number: float) -> float:
        return round(_LEFT + number * self.pitch, 1)

    def y(self, nbytes: int) -> float:
        return round(_HEIGHT - _BOTTOM - nbytes / self.top * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid(plot: _Plot, tick: int) -> Iterator[str]:
    for nbytes in range(0, plot.top + 1, tick):
        y = plot.y(nbytes)
        yield f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" style="stroke:var(--line);fill:none"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{short(nbytes)}</text>'


def _shapes(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[str]:
    wide = round(max(1.0, plot.pitch - (2 if plot.pitch > 6 else 0)), 1)
    for number, bar in enumerate(bars):
        x, y = plot.x(number), plot.y(bar.allocated)
        title = f"{bar.cells}: {signed(bar.delta)} → {format_bytes(bar.allocated)}{' · failed' if bar.raised else ''}"
        height = round(_HEIGHT - _BOTTOM - y, 1)
        yield f'<rect x="{x}" y="{y}" width="{wide}" height="{height}" style="fill:var(--used)"><title>{title}</title></rect>'
        if bar.peak is not None and bar.peak > bar.allocated:
            top = plot.y(bar.peak)
            title = f"{bar.cells}: new peak {format_bytes(bar.peak)}"
            yield f'<path d="M{x} {top}h{wide}" style="stroke:var(--strand);stroke-width:2.5"><title>{title}</title></path>'
        if bar.raised:
            middle = round(x + wide / 2, 1)
            yield f'<text x="{middle}" y="{_HEIGHT - _BOTTOM + 11}" text-anchor="middle" style="fill:var(--warn)">×</text>'


def _reserved(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[str]:
    if any(bar.reserved for bar in bars):
        steps = "".join(f"V{plot.y(bar.reserved)}H{plot.x(number + 1)}" for number, bar in enumerate(bars))
        yield f'<path d="M{_LEFT} {plot.y(0)}{steps}" style="stroke:var(--ctx);stroke-width:1.5;fill:none"/>'


def _numbers(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[str]:
    """Yield the numbers of cells under the bars, as many as there is room for."""
    every = max(1, round(48 / plot.pitch + 0.5))
    for number in range(0, len(bars), every):
        x = round(plot.x(number + 0.5), 1)
        yield f'<text x="{x}" y="{_HEIGHT - 6}" text-anchor="middle">{bars[number].first}</text>'


def _labels(plot: _Plot, bars: Sequence[_Bar]) -> Iterator[str]:
    """Yield the largest changes, written above their bars."""
    taken: list[float] = []
    for number, bar in sorted(enumerate(bars), key=lambda each: -abs(each[1].delta)):
        x = round(plot.x(number + 0.5), 1)
        if len(taken) == _NAMED or abs(bar.delta) * 20 < plot.top:
            return
        if all(abs(x - other) >= _APART for other in taken):
            taken.append(x)
            near = [other for n, other in enumerate(bars) if abs(plot.x(n + 0.5) - x) <= _APART / 2]
            y = round(plot.y(max(max(other.allocated, other.reserved, other.peak or 0) for other in near)) - 6, 1)
            anchor = "start" if x < _LEFT + _APART / 2 else "end" if x > _WIDTH - _APART / 2 else "middle"
            yield f'<text x="{x}" y="{y}" text-anchor="{anchor}" style="fill:var(--ink)">{short(bar.delta, signs=True)}</text>'


def _key(bars: Sequence[_Bar], found: Sequence[tuple[CellRecord, DeviceChange]]) -> str:
    parts = {"allocated": "used"}
    if any(bar.reserved for bar in bars):
        parts["reserved"] = "ctx"
    if any(bar.peak is not None and bar.peak > bar.allocated for bar in bars):
        parts["new peak"] = "strand"
    words = [f'<span><i style="background:var(--{colour})"></i>{name}</span>' for name, colour in parts.items()]
    if any(bar.raised for bar in bars):
        words.append("<span>× failed</span>")
    if len(bars) < len(found):
        words.append(f"<span>each bar: the highest of {-(-len(found) // _BARS)} cells</span>")
    return f'<div class="key">{"".join(words)}</div>'


def short(nbytes: int, *, signs: bool = False) -> str:
    """Return bytes without needless decimals, as a change if `signs`."""
    return (signed(nbytes) if signs else format_bytes(nbytes)).replace(".00", "") if nbytes else "0"
