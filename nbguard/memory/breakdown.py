"""The parts of a device's memory: what this process's allocator has, what else is in use, what is free. They re-add."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from nbguard.memory.facts import AllocatorStats, DeviceFacts, PoolId
from nbguard.memory.fragmentation import fragmentation

NOT_OURS = frozenset({"others", "others and contexts", "driver", "free"})
"""Names of the parts that are not this process's."""

_RELEASABLE = "an empty cache gives it back"
_STRANDED = "free, but between live blocks"
_PENDING = "freed, waiting for another stream"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory, in bytes. `note` explains it in a few words."""

    name: str
    nbytes: int
    note: str = ""


def parts_of(device: DeviceFacts, allocated: int, pid: int, in_use: Collection[PoolId]) -> tuple[Part, ...]:
    """Return the parts of `device`; `allocated` is what its holders hold, `in_use` the private pools that something keeps."""
    if device.allocator is None:
        return (Part("allocated", allocated), *_rest(device, pid, 0))
    if device.segments is None:
        is_expandable = "expandable_segments:True" in device.settings
        cache = _by_counters(device.allocator, allocated, is_expandable)
        return (Part("allocated", allocated), *cache, *_rest(device, pid, device.allocator.reserved))
    found = fragmentation(device.segments, in_use=in_use)
    parts = [
        Part("allocated", found.allocated),
        Part("releasable", found.releasable, _RELEASABLE),
        Part("stranded", found.stranded, _STRANDED),
    ]
    if found.kept:
        parts.append(Part("graph pools", found.kept, "free, but kept for CUDA graphs and MemPools"))
    if found.pending:
        parts.append(Part("pending", found.pending, _PENDING))
    return (*parts, *_rest(device, pid, found.reserved))


def _by_counters(stats: AllocatorStats, allocated: int, is_expandable: bool) -> list[Part]:
    """Return the parts of what is reserved and not `allocated`, as far as counters tell them apart.

    PyTorch counts nothing in expandable segments as split: there a part of what seems releasable is stranded.
    """
    if stats.active is None or stats.inactive_split is None:
        return [Part("cached", max(0, stats.reserved - allocated), "reserved and free")]
    releasable, pending = stats.reserved - stats.active - stats.inactive_split, stats.active - allocated
    at_most, at_least = ("at most; ", "at least; ") if is_expandable else ("", "")
    parts = [
        Part("releasable", releasable, f"{at_most}{_RELEASABLE}"),
        Part("stranded", stats.inactive_split, f"{at_least}{_STRANDED}"),
    ]
    return [*parts, Part("pending", pending, _PENDING)] if pending else parts


def _rest(device: DeviceFacts, pid: int, reserved: int) -> list[Part]:
    """Return the parts outside of what our allocator has `reserved`; none where the device's size is not known."""
    if device.total is None or device.free is None:
        return []
    outside = max(0, device.total - device.free - reserved)
    return [*_outside(device, pid, outside, reserved), Part("free", device.total - reserved - outside)]


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
