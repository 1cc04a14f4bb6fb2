"""The map as an SVG file of its own, for a page, an issue or a slide, without script, in light and dark colours."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.reports.map_picture import bars, key_entries, key_note, summary
from nbguard.memory.reports.map_view import picture_detail
from nbguard.memory.reports.memory_map import DeviceMap, MemoryMap
from nbguard.render.html import palette
from nbguard.render.markup import Html, style_sheet, tag
from nbguard.render.svg import RIGHT, WIDTH, box, words
from nbguard.render.words import clean, clip

_EDGE, _LINE, _HEAD = 12, 18, 40
_KEY_COLUMNS = 2
_TITLE, _NAME = 120, 60
"""Characters of a heading and of an entry of the key."""


def map_svg(memory_map: MemoryMap, limit: int = 12) -> str:
    """Return the map of all devices as an SVG document; at most `limit` segments of each pool stand alone."""
    drawn, pieces = picture_detail(memory_map, limit)
    y, inside = _EDGE, list[Html]()
    for device in memory_map.devices:
        shapes, height = bars(device, drawn, pieces)
        inside.append(words(0, y + 14, clip(f"{device.device}  {device.name}", _TITLE), style=_BOLD))
        inside.append(words(0, y + 30, clip(summary(device), _TITLE)))
        inside.append(tag("g", *shapes, transform=f"translate(0 {y + _HEAD})"))
        y += _HEAD + height
        entries = list(_key(device, y))
        inside += entries
        y += _LINE * -(-len(entries) // (2 * _KEY_COLUMNS)) + _LINE
    if not memory_map.devices:
        inside.append(words(0, y + 14, clip(memory_map.why_not or "no device has memory of PyTorch", _TITLE)))
        y += _HEAD
    wide = WIDTH + 2 * _EDGE
    title = clean(f"Map of {memory_map.file or 'this process'}")
    ground = tag("rect", width=wide, height=y, style="fill:var(--ground)")
    shifted = tag("g", *inside, transform=f"translate({_EDGE} 0)")
    return str(
        tag(
            "svg",
            *(tag("title", title), style_sheet(_style()), ground, shifted),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {wide} {y}",
            width=wide,
            height=y,
            role="img",
        )
    )


_BOLD = "fill:var(--ink);font-weight:600"


def _key(device: DeviceMap, y: int) -> Iterator[Html]:
    """Yield a square and words for each entry of the key, in columns; an even number of shapes."""
    entries = [*key_entries(device), *([("", key_note(device), "")] if key_note(device) else [])]
    wide = (WIDTH - RIGHT) // _KEY_COLUMNS
    for number, (colour, name, figure) in enumerate(entries):
        row, column = divmod(number, _KEY_COLUMNS)
        x, top = column * wide, y + row * _LINE
        yield box(x, top, 9 if colour else 0, 9, colour or "line")
        yield words(x + 14, top + 9, clip(f"{name} {figure}".strip(), _NAME))


def _style() -> str:
    """Return the style sheet: the reports' own colours, on a ground of their own."""
    light, dark = palette()
    shared = "font:11px system-ui,sans-serif;fill:var(--dim)"
    return (
        f"svg{{--ground:#fff;--ink:#1b1b1b;--dim:#5c5c5c;--line:#8884;--warn:#b26a00;{light}{shared}}}"
        f"@media (prefers-color-scheme:dark){{svg{{--ground:#16161a;--ink:#ececec;--dim:#a8a8a8;--warn:#e8a33d;{dark}}}}}"
    )
