"""The map of segments as blocks, with a picture, the holders that pin segments, the largest request, and as an SVG file."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.cleanup.plan.cheapest import Release
from nbguard.memory.core.device_view import command_of
from nbguard.memory.core.pinning import HolderPins
from nbguard.memory.core.requests import LargestRequest
from nbguard.memory.reports.map_picture import bars, key_entries, key_note, map_lines, map_picture, summary
from nbguard.memory.reports.memory_map import DeviceMap, MemoryMap
from nbguard.render.html import Block, Listing, Picture, Section, Table, TableRow, Title, palette
from nbguard.render.markup import Html, clean, clip, style_sheet, tag
from nbguard.render.svg import RIGHT, WIDTH, box, words
from nbguard.texts import MORE, joined
from nbguard.units import counted, format_bytes

_PIECES, _ROWS = 1000, 120
"""At most about so many rectangles, and rows, in all: a picture of any number of blocks stays small."""
_FEWEST, _MOST = 6, 80
_PIN_NAMES = ("pinned by", "pins with", "segments", "stranded there", "alone gives back", "")


def map_blocks(memory_map: MemoryMap, limit: int = 12) -> Iterator[Block]:
    """Yield the map; at most `limit` segments of each pool stand alone, similar ones are added up."""
    if memory_map.file:
        yield Title(joined(" · ", (memory_map.file, *memory_map.notes)), "dim")
    drawn, pieces = picture_detail(memory_map, limit)
    for device in memory_map.devices:
        yield Section(device.device, device.name, summary(device))
        yield Picture(map_picture(device, drawn, pieces), tuple(map_lines(device, limit)))
        if device.by_holder:
            yield _pin_table(device, limit)
        yield Listing(sentences=tuple(_sentences(device)), mark="•")
    if memory_map.without:
        names = "" if memory_map.tracked == "cpu" else f"{', '.join(memory_map.without)}: "
        yield Title(names + memory_map.why_not, "dim")


def picture_detail(memory_map: MemoryMap, limit: int) -> tuple[int, int]:
    """Return the rows of a pool, and the pieces of a row, that keep the pictures of all devices small."""
    drawn = min(limit, max(3, _ROWS // max(1, sum(len(device.pools) for device in memory_map.devices))))
    rows = sum(min(drawn, len(pool.segments)) for device in memory_map.devices for pool in device.pools)
    return drawn, max(_FEWEST, min(_MOST, _PIECES // max(1, rows)))


def _pin_table(device: DeviceMap, limit: int) -> Table:
    """Return the segments that each holder pins."""
    rows = [_pin_row(pins) for pins in device.by_holder[:limit]]
    if more := device.by_holder[limit:]:
        nbytes = format_bytes(sum(pins.nbytes for pins in more))
        rows.append(TableRow(cells=(f"{len(more)} more", nbytes, "", "", "", MORE)))
    return Table(names=_PIN_NAMES, rows=tuple(rows), figures=(2, 3, 4), code=(0,))


def _pin_row(pins: HolderPins) -> TableRow:
    blocks = counted(pins.blocks, "block" if pins.kind in ("library", "pending") else "tensor")
    command = command_of(pins.names, pins.kind, pins.stale)  # every name of it must go
    example = f"e.g. {pins.example}" if pins.example and pins.example != pins.label else ""
    with_what = f"{blocks}, {format_bytes(pins.nbytes)}"
    hint = joined(" · ", filter(None, (example, command and "`" + command + "`")))
    figures = (str(pins.segments), format_bytes(pins.stranded), format_bytes(pins.gives_back))
    return TableRow(cells=(pins.label, with_what, *figures, hint))


def _sentences(device: DeviceMap) -> Iterator[str]:
    """Yield the largest request, rounding, pages, and the cheapest way to a request of one piece."""
    yield _largest(device.largest)
    if device.rounding:
        yield f"rounding: live blocks are {format_bytes(device.rounding)} larger than requested"
    if device.pages is not None:
        pages = device.pages
        yield f"pages of expandable segments: {pages.full} full, {pages.partly} partly used, {pages.free} free"
    if device.release is not None:
        yield _release(device.release, device.device)


def _largest(largest: LargestRequest) -> str:
    most = "at most " if largest.is_bound else ""
    words = f"largest request now: {most}{format_bytes(largest.cached)} from a free block"
    if largest.now is None or largest.flushed is None:
        return words
    most = "at most " if largest.is_bound or largest.is_growth_bound else ""
    now, flushed = format_bytes(largest.now), format_bytes(largest.flushed)
    return (
        f"{words}, {most}{now} with new memory from the device, {most}{flushed} after PyTorch has emptied its cache (which it "
        "does by itself)"
    )


def _release(release: Release, device: str) -> str:
    """Return how to make room for a request of one piece."""
    asked = f"a request of {format_bytes(release.nbytes)}"
    if release.enough is None:
        return f"{asked}: not known, as the free memory of the device is not"
    if not release.enough:
        return f"{asked} would fail on {device} even if every name were released"
    if not release.advice:
        return f"{asked} succeeds now"
    how = joined(" and ", (line.code for line in release.advice))
    note = "" if release.is_exact else " (a good choice among many names, perhaps not the cheapest)"
    lost = f"frees {format_bytes(release.lost)} of yours" if release.names else "frees only stale memory"
    return f"{asked} succeeds after " + how + f": {lost}, gives {format_bytes(release.gives_back)} back to the device{note}"


# --- The map as an SVG file of its own, for a page, an issue or a slide, without script, in light and dark colours.


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
