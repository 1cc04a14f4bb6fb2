"""A moment of a recorded history as blocks, with the event, the peak, the course, the holders and the map of that time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbguard.memory.core.references.holders import Holder
from nbguard.memory.reports.history_view import sparks
from nbguard.memory.reports.map_view import map_blocks
from nbguard.memory.snapshots.diagnosis import device_blocks
from nbguard.memory.snapshots.moment import DeviceMoment, SnapshotMoment
from nbguard.render.html import Block, Line, Listing, Picture, Section, key
from nbguard.render.markup import Html, join
from nbguard.render.svg import LEFT, RIGHT, WIDTH, Scale, area, byte_grid, drawing, line, words
from nbguard.units import format_bytes

_HEIGHT, _TOP, _FLOOR = 150, 14, 128
_MADE_OF = 3
"""Holders that a peak is said to be made of."""

_ACTIONS = {
    "alloc": "a request of {}",
    "free_requested": "{} were freed",
    "free_completed": "{} became free",
    "segment_alloc": "{} came from the device",
    "segment_free": "{} went back to the device",
    "segment_map": "{} of pages came from the device",
    "segment_unmap": "{} of pages went back to the device",
    "oom": "a request of {} found no memory",
    "snapshot": "a snapshot was taken, with {} in use",
}


def moment_blocks(moment: SnapshotMoment, limit: int = 12) -> Iterator[Block]:
    """Yield the moment; at most `limit` holders per device, and segments per pool."""
    for device, then in zip(moment.devices, moment.report.report.devices, strict=True):
        yield Section(f"After event {device.event:,} of {device.events:,}", moment.file, _figures(device))
        yield Line(event_words(device), "strong")
        yield Line(peak_words(device, then.holders))
        yield Picture(_chart(device), (f"  {sparks([point.allocated for point in device.course])}",))
    for then in moment.report.report.devices:
        yield from device_blocks(then, limit)
    if moment.report.notes:
        yield Listing(sentences=moment.report.notes)
    yield from map_blocks(moment.map, limit)


def _figures(device: DeviceMoment) -> str:
    return f"{device.device} · allocated {format_bytes(device.allocated)} · reserved {format_bytes(device.reserved)}"


def event_words(device: DeviceMoment) -> str:
    """Return the event of a moment in words."""
    if not device.event:
        return "This is the state before the first recorded event; nothing earlier is known."
    words = _ACTIONS.get(device.action, "{}").format(format_bytes(device.nbytes))
    return f"The event: {words}{f', in {device.site}' if device.site else ''}."


def peak_words(device: DeviceMoment, holders: Sequence[Holder]) -> str:
    """Return how far a moment, with these holders, is from the peak of its history, or the holders at the peak, in words."""
    if device.event == device.peak_event:
        held = [f"{format_bytes(row.retained)} {row.label}" for row in holders[:_MADE_OF]]
        if more := holders[_MADE_OF:]:
            held.append(f"{format_bytes(sum(row.retained for row in more))} of {len(more)} more")
        rest = ", and smaller ones" if len(held) == _MADE_OF else ""
        return (
            f"The peak was here, {format_bytes(device.peak)}, made of {', '.join(held)}{rest}."
            if held
            else "Nothing is in use."
        )
    below = device.peak - device.allocated
    less = f", {format_bytes(below)} more than here" if below else ", as much as here"
    return f"The peak was {format_bytes(device.peak)} after event {device.peak_event:,}{less}."


def _chart(device: DeviceMoment) -> Html:
    """Return the picture of the course, with allocated as an area, reserved as a line, the moment and the peak as marks."""
    across = Scale(0, max(1, device.events), LEFT, WIDTH - RIGHT)
    up = Scale(0, max(1, *(max(point.allocated, point.reserved) for point in device.course)), _FLOOR, _TOP)
    steps = "".join(f"V{up(point.allocated)}H{across(point.event)}" for point in device.course)
    reserved = "".join(f"V{up(point.reserved)}H{across(point.event)}" for point in device.course)
    here = across(device.event)
    label = (
        f"Memory on {device.device} over {device.events:,} events; allocated {format_bytes(device.allocated)} after this one"
    )
    inside = (
        *byte_grid(up),
        area(f"M{LEFT} {up(0)}{steps}V{up(0)}Z", "used", opacity="0.55"),
        line(f"M{LEFT} {up(0)}{reserved}", "ctx", width=1.5),
        line(f"M{across(device.peak_event)} {up(device.peak)}v-8", "strand", width=2.5, title="the peak"),
        line(f"M{here} {_TOP - 6}V{_FLOOR}", "accent", width=2, title="this moment"),
        words(LEFT, _HEIGHT - 6, "event 0"),
        words(WIDTH - RIGHT, _HEIGHT - 6, f"{device.events:,}", anchor="end"),
    )
    parts = (("used", "allocated", ""), ("ctx", "reserved", ""), ("strand", "peak", ""), ("accent", "this moment", ""))
    return join((drawing(label, _HEIGHT, inside), key(*parts)))
