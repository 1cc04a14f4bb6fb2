"""A tick: the counters now, and the line of the last minutes. Pure; `sidebar/hub/device_reader.py` reads the counters."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.breakdown import DevicePart, Part, bound_of, parts_of
from nbguard.memory.counters import TickReading
from nbguard.memory.facts import DeviceFacts
from nbguard.sidebar.protocol.sparkline import Sparkline
from nbguard.sidebar.protocol.state import DeviceTick, FitTick, JobStatus, Tick
from nbguard.sidebar.protocol.truncation import truncate_utf8

_TALKATIVE = 2
"""Of more devices only the parts that there are are sent, with no note that is the same of each: a tick is to be small."""
_SOURCES = {"malloc": "in use by malloc", "resident": "resident"}


def build_tick(
    boot: str,
    n: int,
    t: float,
    heap: int,
    reading: TickReading,
    history: Sparkline,
    *,
    busy: bool,
    cell: int | None = None,
    fit: FitTick | None = None,
    jobs: tuple[JobStatus, ...] = (),
) -> Tick:
    """Return the `n`-th tick of the kernel `boot`, at time `t`; `heap` is the number of the heap that goes with it.

    `history` knows this reading already.
    """
    brief = len(reading.devices) > _TALKATIVE
    devices = tuple(_device(reading, device, history, brief) for device in reading.devices)
    return Tick(
        boot=boot,
        n=n,
        t=round(t, 3),
        heap=heap,
        tracked=reading.tracked,
        busy=busy,
        cell=cell,
        devices=devices,
        fit=fit,
        jobs=jobs,
        marks=history.marks(t),
    )


def _device(reading: TickReading, device: DeviceFacts, history: Sparkline, brief: bool) -> DeviceTick:
    parts = _parts(reading, device)
    if brief:
        some = (part for part in parts if part.nbytes)
        parts = tuple(p if p.name == DevicePart.OTHERS else replace(p, note=bound_of(device, p.name)) for p in some)
    peak = None if device.allocator is None else device.allocator.peak_allocated
    return DeviceTick(
        device=device.device,
        name=truncate_utf8(device.name, 60),
        total=device.total,
        parts=parts,
        peak=peak,
        spark=history.points(device.device),
    )


def _parts(reading: TickReading, device: DeviceFacts) -> tuple[Part, ...]:
    if reading.process is not None:
        source = _SOURCES.get(reading.source, reading.source)
        return (Part(DevicePart.PROCESS, reading.process, f"tensors and everything else in this process ({source})"),)
    allocated = 0 if device.allocator is None else device.allocator.allocated
    return parts_of(device, allocated, reading.pid, ())
