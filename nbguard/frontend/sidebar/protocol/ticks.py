"""A tick with the present counters and the newest reading of each device's line. Pure; `hub/device_reader.py` reads them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

from nbguard.frontend.sidebar.protocol.state import (
    DeviceTick,
    FitTick,
    FittingRequest,
    JobStatus,
    LinePoint,
    Neighbour,
    Tick,
    TimeMark,
)
from nbguard.memory.core.analysis import NOT_OURS, DevicePart, Part, bound_of, by_identity, other_processes, parts_of
from nbguard.memory.core.facts import Counted, DeviceFacts, ProcessFact, TickReading
from nbguard.memory.core.processes import Identity
from nbguard.memory.core.requests import RequestLimits
from nbguard.plain_data import to_plain

# --- Text and lists cut so that they fit into a message: a name may be 10 kB long, and there may be a thousand of them.


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Found = TypeVar("Found", bound="DataclassInstance")

TEXT = 200
"""So many bytes of a label, a path or a description are sent."""
_SENTENCE = 400
"""So many bytes of a sentence are sent."""
_UNSEEN = ("Cc", "Cs")


def truncate_utf8(text: str, limit: int = TEXT) -> str:
    """Return `text` in at most `limit` bytes of UTF-8, an ellipsis at its end if it was longer.

    Control characters become spaces, and half a surrogate pair, which no encoding can write, a replacement character.
    """
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text
    printable = "".join(_shown(each) if unicodedata.category(each) in _UNSEEN else each for each in text[: limit + 1])
    encoded = printable.encode()
    if len(encoded) <= limit and len(text) <= limit:
        return printable
    return encoded[: limit - len("…".encode())].decode(errors="ignore") + "…"


def _shown(character: str) -> str:
    return "�" if unicodedata.category(character) == "Cs" else " "


def json_bytes(message: DataclassInstance) -> int:
    """Return the bytes that a view takes as JSON, as Jupyter writes it."""
    return len(json.dumps(to_plain(message), ensure_ascii=False).encode(errors="replace"))


def fitting(rows: Iterable[Found], room: int) -> tuple[Found, ...]:
    """Return as many of `rows`, from the first on, as fit into `room` bytes of JSON."""
    used = 0

    def fits(row: Found) -> bool:
        nonlocal used
        used += json_bytes(row) + len(", ")
        return used <= room

    return tuple(takewhile(fits, rows))


_TALKATIVE = 2
"""Of more devices only the parts that there are are sent, with no note that is the same of each: a tick is to be small."""
_NEIGHBOURS = 8
_SOURCES = {"malloc": "in use by malloc", "resident": "resident"}
_OTHERS = NOT_OURS - {DevicePart.FREE, DevicePart.SPILLED}
"""The parts that are neither this process's nor free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastLook:
    """The last scan of the heap, as far as a tick needs it to tell the facts that still hold."""

    heap: int = 0  # number of the memory state
    cell: int | None = None  # number of the last cell whose end left memory as in that state
    counted: tuple[Counted, ...] = ()  # the allocators' counters at the scan
    limits: Mapping[str, RequestLimits] = field(default_factory=dict)  # by device, while these counters stay the same

    def limits_of(self, reading: TickReading, device: str) -> RequestLimits | None:
        """Return the limits of the largest request on a device, or None if blocks have changed since the scan."""
        return self.limits.get(device) if reading.counted == self.counted else None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device of one reading, with its parts."""

    facts: DeviceFacts
    parts: tuple[Part, ...]


def device_readings(reading: TickReading) -> tuple[DeviceReading, ...]:
    """Return the devices of a reading, each with its parts."""
    return tuple(DeviceReading(device, _parts(reading, device)) for device in reading.devices)


def line_points(t: float, reading: TickReading, devices: tuple[DeviceReading, ...]) -> dict[str, LinePoint]:
    """Return the reading of the time `t` as a point of each device's line; none of devices that this process has not used."""
    in_use, t = reading.in_use, round(t, 2)
    return {each.facts.device: _point(t, in_use[each.facts.device], each) for each in devices if each.facts.device in in_use}


def build_tick(
    boot: str,
    n: int,
    t: float,
    reading: TickReading,
    *,
    devices: tuple[DeviceReading, ...],
    points: Mapping[str, LinePoint],
    look: LastLook,
    busy: bool,
    cell: int | None = None,
    fit: FitTick | None = None,
    survived: Iterable[str] = (),
    jobs: tuple[JobStatus, ...] = (),
    marks: tuple[TimeMark, ...] = (),
) -> Tick:
    """Return the `n`-th tick of the kernel `boot`, at time `t`: `devices` and `points` are those of `reading`."""
    brief = len(devices) > _TALKATIVE
    return Tick(
        boot=boot,
        n=n,
        t=round(t, 3),
        heap=look.heap,
        heap_cell=look.cell,
        tracked=reading.tracked,
        busy=busy,
        cell=cell,
        devices=tuple([_device(reading, each, points.get(each.facts.device), look, brief) for each in devices]),
        fit=fit,
        survived=tuple([truncate_utf8(sentence, _SENTENCE) for sentence in survived]),
        jobs=jobs,
        marks=marks,
        neighbours=_neighbours(reading),
    )


def _neighbours(reading: TickReading) -> tuple[Neighbour, ...]:
    """Return who else is on the devices of a reading, the largest first."""
    found = [
        _neighbour(device.device, group)
        for device in reading.devices
        for group in by_identity(other_processes(device, reading.pid))
    ]
    return tuple(sorted(found, key=lambda each: -(each.nbytes or 0))[:_NEIGHBOURS])


def _neighbour(device: str, group: Sequence[ProcessFact]) -> Neighbour:
    identity = group[0].identity or Identity()
    used = [each.used for each in group if each.used is not None]
    kernels = (each.identity.kernel for each in group if each.identity is not None and not each.identity.is_own)
    return Neighbour(
        device=device,
        kernel=next(filter(None, kernels), ""),
        name=truncate_utf8(identity.short, 100),
        nbytes=sum(used) if len(used) == len(group) else None,
    )


def _point(t: float, in_use: int, device: DeviceReading) -> LinePoint:
    stats, others, free = device.facts.allocator, 0, None
    for part in device.parts:
        if part.name == DevicePart.FREE:
            free = part.nbytes
        elif part.name in _OTHERS:
            others += part.nbytes
    reserved = None if stats is None else stats.reserved
    return LinePoint(
        since=t,
        until=t,
        low=in_use,
        high=in_use,
        allocated=in_use,
        reserved=reserved,
        others=None if free is None else others,
        free=free,
    )


def _device(reading: TickReading, device: DeviceReading, point: LinePoint | None, look: LastLook, brief: bool) -> DeviceTick:
    facts, parts = device.facts, device.parts
    if brief:
        some = (part for part in parts if part.nbytes)
        parts = tuple(p if p.name == DevicePart.OTHERS else replace(p, note=bound_of(facts, p.name)) for p in some)
    return DeviceTick(
        device=facts.device,
        name=truncate_utf8(facts.name, 60),
        total=facts.total,
        parts=parts,
        peak=None if facts.allocator is None else facts.allocator.peak_allocated,
        line=point,
        fits=_fits(look.limits_of(reading, facts.device), facts.free),
    )


def _fits(limits: RequestLimits | None, free: int | None) -> FittingRequest | None:
    """Return the largest request that would succeed now; None where that is not known."""
    if limits is None or free is None:
        return None
    largest = limits.largest(free)
    return None if largest.now is None or largest.flushed is None else FittingRequest(largest.now, largest.flushed)


def _parts(reading: TickReading, device: DeviceFacts) -> tuple[Part, ...]:
    if reading.process is not None:
        source = _SOURCES.get(reading.source, reading.source)
        return (Part(DevicePart.PROCESS, reading.process, f"tensors and everything else in this process ({source})"),)
    allocated = 0 if device.allocator is None else device.allocator.allocated
    return parts_of(device, allocated, reading.pid, ())
