"""Pictures of a fit: its memory over time with one batch in detail beside it, or a step by phase. Inline SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from nbguard.profiler.analysis.report import EpochRow, MemoryPoint, MemoryReport, TimeRow
from nbguard.profiler.render.time import COLOURS, REST
from nbguard.render.blocks import NAME, clean
from nbguard.render.chart import scale, short
from nbguard.units import format_bytes, format_time

_WIDTH, _HEIGHT = 860, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 8, 18, 22
_GAP, _CLOSE_UP = 26, 250
"""Pixels between the whole fit and the batch beside it, and those of the latter."""
_FEW = 48
"""So many points are drawn each by itself, with its phase; of more there is an envelope, and a close-up of one batch."""
_FOLLOWED = 4
"""A batch with so many points is one whose phases can be drawn."""
_SMALL, _TINY = 0.2, 0.02
"""Shares of the height: changes within the first are hard to see; those within the second would be hard to label, too."""
_BUCKETS = 140
_RULED = 40
"""Epochs of which each has its line."""
_APART = 56
"""Pixels between the labels of two epochs."""
_SECOND = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """From nanoseconds and bytes to pixels."""

    left: float
    right: float
    start: int
    end: int
    floor: int
    top: int

    def x(self, at: int) -> float:
        return round(self.left + (at - self.start) / max(1, self.end - self.start) * (self.right - self.left), 1)

    def y(self, nbytes: int) -> float:
        share = (nbytes - self.floor) / max(1, self.top - self.floor)
        return round(_HEIGHT - _BOTTOM - max(0.0, share) * (_HEIGHT - _TOP - _BOTTOM), 1)


def memory_picture(memory: MemoryReport, epochs: Sequence[EpochRow]) -> str:
    """Return memory over time with its key; `epochs` whose start is known are ruled."""
    points, shown, notes = memory.points, memory.points, []
    floor, top = _span(points, memory.peak)
    if len(points) <= _FEW:
        whole = _Panel(left=_LEFT, right=_WIDTH - _RIGHT, start=points[0].at, end=points[-1].at, floor=floor, top=top)
        inside = list(_phases(whole, points))
    else:
        shown = _in_detail(points)
        notes.append("the whole fit: the least and the most that was seen at a time")
        right = _WIDTH - _RIGHT - (_CLOSE_UP + _GAP if shown else 0)
        whole = _Panel(left=_LEFT, right=right, start=0, end=points[-1].at, floor=floor, top=top)
        inside = [*_envelope(whole, points), *(_close_up(shown, floor, top) if shown else ())]
    notes += [f"begins at {short(floor)}"] if floor else []
    inside = [*_grid(whole, memory.peak), *inside, *_reserved(whole, points), *_epochs(whole, epochs), *_times(whole)]
    label = (
        f"Memory of {memory.device} over {format_time(whole.end)}: {format_bytes(memory.peak)} at most; its figures are above"
    )
    colours = {"reserved": "ctx"} if any(point.reserved for point in points) else {}
    return _svg(label, _HEIGHT, inside) + _key(colours | _colours(point.phase for point in shown[1:]), " · ".join(notes))


def _span(points: Sequence[MemoryPoint], peak: int) -> tuple[int, int]:
    """Return the bytes at the bottom and at the top: 0 at the bottom, unless what changes is a small part of all."""
    top = max(peak, *(max(point.allocated, point.reserved or 0) for point in points), 1)
    least = min(point.allocated for point in points)
    if not _TINY * top <= top - least <= _SMALL * top:
        return 0, top
    tick, _ = scale(2 * (top - least))
    return max(0, (least // tick - 1) * tick), top


def _svg(label: str, height: int, inside: Sequence[str]) -> str:
    style = "width:100%;height:auto;display:block;margin:8px 0 2px;font-size:11px;fill:var(--dim)"
    name = escape(clean(label))
    return f'<svg role="img" aria-label="{name}" viewBox="0 0 {_WIDTH} {height}" style="{style}">{"".join(inside)}</svg>'


def _in_detail(points: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Return the points of one batch: of those followed phase by phase, the one that reached most; none if none was."""
    batches: dict[int, list[MemoryPoint]] = {}
    for point in points:
        batches.setdefault(point.batch, []).append(point)
    followed = [found for found in batches.values() if len(found) >= _FOLLOWED]
    if not followed:
        return ()
    return tuple(max(followed, key=lambda found: max(point.allocated for point in found)))


def _grid(panel: _Panel, peak: int) -> Iterator[str]:
    tick, _ = scale(panel.top - panel.floor)
    for nbytes in range(panel.floor, panel.top + 1, tick):
        y = panel.y(nbytes)
        yield f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" style="stroke:var(--line);fill:none"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{short(nbytes)}</text>'
    y = panel.y(peak)
    yield f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" style="stroke:var(--warn);stroke-dasharray:3 3;fill:none"/>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{y - 4}" text-anchor="end" style="fill:var(--warn)">{format_bytes(peak)}</text>'


def _phases(panel: _Panel, points: Sequence[MemoryPoint]) -> Iterator[str]:
    """Yield what was allocated from point to point, in the colour of the phase that went on."""
    base = panel.y(panel.floor)
    for before, after in pairwise(points):
        left, right = panel.x(before.at), panel.x(after.at)
        title = f"{escape(clean(after.phase, NAME))}: {format_bytes(before.allocated)} → {format_bytes(after.allocated)}"
        yield (
            f'<path d="M{left} {base}V{panel.y(before.allocated)}L{right} {panel.y(after.allocated)}V{base}Z" '
            f'style="fill:var(--{COLOURS.get(after.phase, REST)})"><title>{title}</title></path>'
        )


def _envelope(panel: _Panel, points: Sequence[MemoryPoint]) -> Iterator[str]:
    """Yield what was allocated at least and at most in each stretch of time."""
    stretches: dict[int, list[int]] = {}
    for point in points:
        stretches.setdefault((point.at - panel.start) * _BUCKETS // (panel.end - panel.start + 1), []).append(point.allocated)
    middle = (panel.end - panel.start) / _BUCKETS
    places = [panel.x(panel.start + round((number + 0.5) * middle)) for number in stretches]
    high = [f"{x} {panel.y(max(values))}" for x, values in zip(places, stretches.values(), strict=True)]
    low = [f"{x} {panel.y(min(values))}" for x, values in zip(places, stretches.values(), strict=True)]
    base = panel.y(panel.floor)
    yield f'<path d="M{places[0]} {base}L{" ".join(low)}L{places[-1]} {base}Z" style="fill:var(--used)"/>'
    yield f'<path d="M{" ".join(high)}L{" ".join(reversed(low))}Z" style="fill:var(--used);fill-opacity:.45"/>'


def _close_up(points: Sequence[MemoryPoint], floor: int, top: int) -> Iterator[str]:
    panel = _Panel(
        left=_WIDTH - _RIGHT - _CLOSE_UP, right=_WIDTH - _RIGHT, start=points[0].at, end=points[-1].at, floor=floor, top=top
    )
    yield from _phases(panel, points)
    yield f'<text x="{panel.left}" y="11">batch {points[-1].batch} in detail</text>'
    took = format_time(panel.end - panel.start)
    yield f'<text x="{panel.right}" y="{_HEIGHT - 6}" text-anchor="end">{took}</text>'


def _reserved(panel: _Panel, points: Sequence[MemoryPoint]) -> Iterator[str]:
    """Yield what was reserved, a line that turns where that changes; at one pixel it turns once, to the most."""
    highest: dict[int, float] = {}
    for point in points:
        if point.reserved:
            x, y = round(panel.x(point.at)), panel.y(point.reserved)
            highest[x] = min(y, highest.get(x, y))
    if highest:
        turns = [(x, y) for (_, before), (x, y) in pairwise(highest.items()) if y != before]
        first, y = next(iter(highest.items()))
        line = f"M{first} {y}{''.join(f'H{x}V{y}' for x, y in turns)}H{max(highest)}"
        yield f'<path d="{line}" style="stroke:var(--ctx);stroke-width:1.5;fill:none"/>'


def _epochs(panel: _Panel, epochs: Sequence[EpochRow]) -> Iterator[str]:
    """Yield a line where an epoch begins, with its number where there is room."""
    found = [(epoch.number, epoch.start) for epoch in epochs if epoch.is_training and epoch.start is not None]
    written = -float(_WIDTH)
    for number, start in found if 1 < len(found) <= _RULED else ():
        x = panel.x(start)
        if start < panel.end:
            yield f'<path d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}" style="stroke:var(--dim);stroke-opacity:.5;fill:none"/>'
        if x - written >= _APART and panel.right - x >= _APART:
            yield f'<text x="{x + 3}" y="11">epoch {number}</text>'
            written = x


def _times(panel: _Panel) -> Iterator[str]:
    """Yield round times below the picture."""
    wall = panel.end - panel.start
    steps = [factor * 10**power for power in range(11) for factor in (1, 2, 5)]
    steps += [60 * _SECOND * factor for factor in (1, 2, 5, 10, 20, 30)] + [3600 * _SECOND * 2**n for n in range(10)]
    step = next(step for step in sorted(steps) if wall <= 5 * step)
    for at in range(0, wall + 1, step):
        text = format_time(at) if at else "0"
        for needless in (".00", ".0", " 00 s", " 00 min"):
            text = text.replace(needless, "")
        yield f'<text x="{panel.x(panel.start + at)}" y="{_HEIGHT - 6}" text-anchor="middle">{text}</text>'


def _key(colours: dict[str, str], note: str) -> str:
    """Return what each colour of a picture stands for, and in a note what the picture is."""
    words = [f'<span><i style="background:var(--{colour})"></i>{name}</span>' for name, colour in colours.items()]
    return f'<div class="key">{"".join(words)}{f"<span>{note}</span>" if note else ""}</div>'


def _colours(phases: Iterable[str]) -> dict[str, str]:
    return {phase if phase in COLOURS else "all else": COLOURS.get(phase, REST) for phase in phases}


def step_picture(rows: Sequence[TimeRow]) -> str:
    """Return the phases of a batch side by side, each as wide as its median; nothing where no median is known."""
    known = [(row.phase, row.median) for row in rows if row.group == "batch" and row.median]
    whole = sum(median for _, median in known)
    inside, x = [], 0.0
    for phase, median in known:
        wide = median / whole * _WIDTH
        title = f"<title>{escape(clean(phase, NAME))}: {format_time(median)}</title>"
        place = f'x="{x:.1f}" y="0" width="{wide:.1f}" height="22"'
        inside.append(f'<rect {place} style="fill:var(--{COLOURS.get(phase, REST)})">{title}</rect>')
        x += wide
    label = f"A batch by phase, {format_time(whole)} by the medians of its phases; the table above has the figures"
    return _svg(label, 22, inside) + _key(_colours(phase for phase, _ in known), "a batch, by medians") if known else ""
