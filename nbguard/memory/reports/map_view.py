"""The map of segments as blocks, per device a picture, the holders that pin segments, the largest request."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.cleanup.plan.cheapest import Release
from nbguard.memory.core.segments.pinning import HolderPins
from nbguard.memory.core.segments.requests import LargestRequest
from nbguard.memory.core.views.device import command_of
from nbguard.memory.reports.map_picture import map_lines, map_picture, summary
from nbguard.memory.reports.memory_map import DeviceMap, MemoryMap
from nbguard.render.blocks import Block, Listing, Picture, Section, Table, TableRow, Title
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
