"""The parts of a device's memory: what this process's allocator has, what else is in use, what is free. They re-add."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nbguard.core.facts import DeviceFacts, PoolId
from nbguard.core.fragmentation import fragmentation

NOT_OURS = frozenset({"others", "others and contexts", "driver", "free"})
"""Names of the parts that are not this process's."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory, in bytes. `note` explains it in a few words."""

    name: str
    nbytes: int
    note: str = ""


def parts_of(device: DeviceFacts, allocated: int, pid: int, in_use: Collection[PoolId]) -> tuple[Part, ...]:
    """Return the parts of `device`; `allocated` is what its holders hold, `in_use` the private pools that something keeps."""
    if device.allocator is None:
        return (Part("allocated", allocated),)
    if device.segments is None:
        cached = max(0, device.allocator.reserved - allocated)
        return (Part("allocated", allocated), Part("cached", cached, "reserved and free"))
    found = fragmentation(device.segments, in_use=in_use)
    parts = [
        Part("allocated", found.allocated),
        Part("releasable", found.releasable, "an empty cache gives it back"),
        Part("stranded", found.stranded, "free, but between live blocks"),
    ]
    if found.kept:
        parts.append(Part("graph pools", found.kept, "free, but kept for CUDA graphs and MemPools"))
    if found.pending:
        parts.append(Part("pending", found.pending, "freed, waiting for another stream"))
    if device.total is not None and device.free is not None:
        outside = max(0, device.total - device.free - found.reserved)
        parts += _outside(device, pid, outside, found.reserved)
        parts.append(Part("free", device.total - found.reserved - outside))
    return tuple(parts)


def _outside(device: DeviceFacts, pid: int, outside: int, reserved: int) -> list[Part]:
    """Tell the bytes in use outside our allocator apart, as far as the driver lists processes.

    In containers it lists none, or under pids of the host: then a single process must be this one, and of several none can
    be told to be. What belongs to no process is the driver's own.
    """
    unknown = [Part("others and contexts", outside, "other processes and CUDA contexts; the driver does not say which")]
    processes = None if device.nvml is None else device.nvml.processes
    if processes is None:
        return unknown
    mine = [process for process in processes if process.pid == pid]
    if device.has_context and not mine:
        if len(processes) != 1:
            return unknown
        mine = list(processes)
    others = [process for process in processes if process not in mine]
    used = [process.used for process in others if process.used is not None]
    if len(used) < len(others):
        return unknown
    theirs = min(sum(used), outside)
    context = outside - theirs
    if not mine:
        context = 0
    elif mine[0].used is not None:
        context = min(context, max(0, mine[0].used - reserved))
    driver = outside - theirs - context
    parts = [Part("context", context, "CUDA itself in this kernel")] if mine else []
    parts.append(Part("others", theirs, f"{len(others)} other process{'es' if len(others) != 1 else ''}"))
    return [*parts, Part("driver", driver, "in use, but by no process that the driver lists")] if driver else parts
