"""Pictures as inline SVG in the colours of the host's theme, with scales, a grid of bytes, shapes, text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nbguard.render.markup import Html, clean, tag
from nbguard.units import KiB, format_bytes, signed

WIDTH = 860
"""Pixels of a picture, as wide as a page."""
LEFT, RIGHT = 76, 8
"""Pixels for the figures at the left of a grid, and those left free at the right."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Amounts to pixels: `low` is drawn at `start`, `high` at `end`; amounts below `low` as `low`."""

    low: int
    high: int
    start: float
    end: float

    def __call__(self, amount: float) -> float:
        """Return the pixel of an amount."""
        share = max(0.0, (amount - self.low) / max(1, self.high - self.low))
        return round(self.start + share * (self.end - self.start), 1)


def drawing(label: str, height: int, inside: Iterable[Html], margin: str = "") -> Html:
    """Return a picture as wide as the page; `label` describes it for readers who cannot see it."""
    space = f"margin:{margin};" if margin else ""
    style = f"width:100%;height:auto;display:block;{space}font-size:11px;fill:var(--dim)"
    return tag("svg", *inside, role="img", aria_label=clean(label), viewBox=f"0 0 {WIDTH} {height}", style=style)


def byte_step(span: int) -> int:
    """Return the bytes from one line of a grid to the next: a round number, so that there are four lines at most."""
    size = KiB ** ((max(span, 1).bit_length() - 1) // 10)
    steps: Iterator[int] = (factor * 10**power * size for power in range(4) for factor in (1, 2, 5))
    return next(step for step in steps if span <= 4 * step)


def byte_grid(y: Scale) -> Iterator[Html]:
    """Yield the lines of round amounts of bytes across the picture, with their figures at the left."""
    for nbytes in range(y.low, y.high + 1, byte_step(y.high - y.low)):
        at = y(nbytes)
        yield line(f"M{LEFT} {at}H{WIDTH - RIGHT}", "line")
        yield words(LEFT - 6, at + 4, short(nbytes), anchor="end")


def short(nbytes: int, *, signs: bool = False) -> str:
    """Return bytes for an axis or a mark, where none need no unit; as a change if `signs`."""
    return (signed(nbytes) if signs else format_bytes(nbytes)) if nbytes else "0"


def line(path: str, colour: str, *, width: float | None = None, dashes: str = "", opacity: str = "", title: str = "") -> Html:
    """Return a line along a path."""
    style = f"stroke:var(--{colour})" + (f";stroke-width:{width}" if width else "")
    style += (f";stroke-dasharray:{dashes}" if dashes else "") + (f";stroke-opacity:{opacity}" if opacity else "")
    return tag("path", *titled(title), d=path, style=f"{style};fill:none")


def area(path: str, colour: str, *, opacity: str = "", title: str = "") -> Html:
    """Return the area within a path."""
    style = f"fill:var(--{colour})" + (f";fill-opacity:{opacity}" if opacity else "")
    return tag("path", *titled(title), d=path, style=style)


def box(
    x: float, y: float, width: float | str, height: float, colour: str, *, title: str = "", nbytes: int | None = None
) -> Html:
    """Return a rectangle that stands for so many bytes."""
    style = f"fill:var(--{colour})"
    return tag("rect", *titled(title), x=x, y=y, width=width, height=height, data_bytes=nbytes, style=style)


def words(x: float, y: float, text: str, *, anchor: str = "", colour: str = "", title: str = "", style: str = "") -> Html:
    """Return a text beside, around or before `x`, as the anchor says (start, middle, end)."""
    shown = f"fill:var(--{colour})" if colour else style
    return tag("text", *titled(title), clean(text), x=x, y=y, text_anchor=anchor, style=shown)


def titled(title: str) -> list[Html]:
    """Return the words that are shown where the mouse rests, as an element, if there are any."""
    return [tag("title", clean(title))] if title else []
