"""What stands below a map, for text and HTML alike: who pins what, the largest request, what a request needs."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.pinning import HolderPins
from nbguard.render.rows import command_of
from nbguard.reports.memory_map import DeviceMap
from nbguard.units import format_bytes

PIN_HEAD = ("pinned by", "pins with", "segments", "stranded there", "alone gives back", "")


def pin_table(device: DeviceMap, limit: int) -> list[tuple[str, ...]]:
    """Return what each holder pins, its heading first; empty where nothing is stranded."""
    rows = [_pin_row(row) for row in device.by_holder[:limit]]
    if more := device.by_holder[limit:]:
        rows.append((f"{len(more)} more", format_bytes(sum(row.nbytes for row in more)), "", "", "", "-n shows more"))
    return [PIN_HEAD, *rows] if rows else []


def _pin_row(row: HolderPins) -> tuple[str, ...]:
    unit = "block" if row.kind in ("library", "pending") else "tensor"
    pins = f"{row.blocks} {unit}{'s' if row.blocks != 1 else ''}, {format_bytes(row.nbytes)}"
    command = command_of(row.names, row.kind, row.stale)
    example = f"e.g. {row.example}" if row.example and row.example != row.label else ""
    said = " · ".join(filter(None, (example, command)))
    return row.label, pins, str(row.segments), format_bytes(row.stranded), format_bytes(row.gives_back), said


def facts_lines(device: DeviceMap) -> Iterator[str]:
    """Yield the sentences below a map: the largest request, rounding, pages, what a request needs."""
    largest = device.largest
    most = "at most " if largest.is_bound else ""
    said = f"largest request now: {most}{format_bytes(largest.cached)} from a free block"
    if largest.now is not None and largest.flushed is not None:
        most = "at most " if largest.is_bound or largest.is_growth_bound else ""
        said += (
            f", {most}{format_bytes(largest.now)} with new memory from the device, {most}{format_bytes(largest.flushed)} after "
            "PyTorch has emptied its cache (which it does by itself)"
        )
    yield said
    if device.rounding:
        yield f"rounding: live blocks are {format_bytes(device.rounding)} larger than what was asked for"
    if device.pages is not None:
        pages = device.pages
        yield f"pages of expandable segments: {pages.full} full, {pages.partly} partly used, {pages.free} free"
    if device.release is not None:
        yield release_line(device)


def release_line(device: DeviceMap) -> str:
    """Return what a request of one piece needs, in words."""
    release = device.release
    assert release is not None  # noqa: S101 - asked for
    asked = f"a request of {format_bytes(release.nbytes)}"
    if release.enough is None:
        return f"{asked}: not known, as what is free on the device is not"
    if not release.enough:
        return f"{asked}: not even letting every name go makes room for it on {device.device}"
    if not release.commands:
        return f"{asked} succeeds now"
    how = " and ".join(f"`{command}`" for command in release.commands)
    found = "" if release.is_exact else " (a good choice among many names, perhaps not the cheapest)"
    lost = f"frees {format_bytes(release.lost)} of yours" if release.names else "frees only what is stale"
    return f"{asked} succeeds after {how}: {lost}, gives {format_bytes(release.gives_back)} back to the device{found}"
