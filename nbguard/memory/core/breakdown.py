"""The parts of a device's memory (of this process's allocator, of others, and free), which add up to the device's size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, PoolId, ProcessFact
from nbguard.memory.core.processes import pids_text
from nbguard.memory.core.segments.fragmentation import fragmentation
from nbguard.units import counted, format_bytes


class DevicePart(str, Enum):
    """The key of a part, in JSON and on the wire to a sidebar: it stays when the words for people change."""

    ALLOCATED = "allocated"  # in tensors and other live blocks (allocated_bytes.all.current)
    RELEASABLE = "releasable"  # reserved and free, and `torch.cuda.empty_cache()` gives it back
    STRANDED = "stranded"  # reserved and free, but a live block keeps its segment
    GRAPH_POOLS = "graph pools"  # reserved and free, but only for the CUDA graph or MemPool whose pool it is or may still be
    PENDING = "pending"  # freed, but another stream may still use it
    CACHED = "cached"  # reserved and free, where nothing tells how much of it is releasable
    CONTEXT = "context"  # CUDA itself in this process: what NVML counts for it beyond what is reserved
    OTHERS = "others"  # other processes (NVML)
    OUTSIDE = "others and contexts"  # in use outside our allocator, where the driver does not say by whom
    DRIVER = "driver"  # in use by no process that the driver lists
    FREE = "free"  # free on the device (cudaMemGetInfo)
    SPILLED = "spilled"  # in tensors that lie in the airbag's host memory: none of the device's
    PROCESS = "process"  # the whole process, where no allocator counts its tensors

    __str__ = str.__str__  # a part reads as its key wherever it is written
    __repr__ = str.__repr__


LABELS: dict[str, str] = {
    DevicePart.ALLOCATED: "allocated",
    DevicePart.RELEASABLE: "releasable",
    DevicePart.STRANDED: "stranded",
    DevicePart.GRAPH_POOLS: "graph pools",
    DevicePart.PENDING: "pending",
    DevicePart.CACHED: "cached",
    DevicePart.CONTEXT: "context",
    DevicePart.OTHERS: "others",
    DevicePart.OUTSIDE: "others and contexts",
    DevicePart.DRIVER: "driver",
    DevicePart.FREE: "free",
    DevicePart.SPILLED: "spilled",
    DevicePart.PROCESS: "process",
}
"""Each part in the words for people."""

NOT_OURS = frozenset({DevicePart.OTHERS, DevicePart.OUTSIDE, DevicePart.DRIVER, DevicePart.FREE, DevicePart.SPILLED})
"""The parts of a device that are not this process's."""

_NAMED = 4
"""Notebooks and programs that are named in one line."""
_RELEASABLE = "PyTorch's cache: emptying it gives it back"
_STRANDED = "free, but between live blocks"
_PENDING = "freed, waiting for another stream"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory, or one figure of the host's."""

    name: str  # a `DevicePart`; of the host's figures their words
    nbytes: int
    note: str = ""  # explanation in a few words

    @property
    def label(self) -> str:
        """Return the part in the words for people."""
        return LABELS.get(self.name, self.name)


def parts_of(device: DeviceFacts, allocated: int, pid: int, in_use: Collection[PoolId]) -> tuple[Part, ...]:
    """Return the parts of `device`; `allocated`: bytes of its holders, `in_use`: private pools that an object keeps.

    They add up to the device's size; what is spilled comes last, beyond it.
    """
    spilled = 0 if device.airbag is None else device.airbag.spilled
    parts = _parts_of(device, allocated, pid, in_use)
    return (*parts, Part(DevicePart.SPILLED, spilled, "in host memory: the airbag's")) if spilled else parts


def _parts_of(device: DeviceFacts, allocated: int, pid: int, in_use: Collection[PoolId]) -> tuple[Part, ...]:
    if device.allocator is None:
        return (Part(DevicePart.ALLOCATED, allocated), *_rest(device, pid, 0))
    if device.segments is None:
        cache = _by_counters(device, device.allocator, allocated)
        return (Part(DevicePart.ALLOCATED, allocated), *cache, *_rest(device, pid, device.allocator.reserved))
    space = fragmentation(device.segments, in_use=in_use)
    parts = [
        Part(DevicePart.ALLOCATED, space.allocated),
        Part(DevicePart.RELEASABLE, space.releasable, _RELEASABLE),
        Part(DevicePart.STRANDED, space.stranded, _STRANDED),
    ]
    if space.kept:
        parts.append(Part(DevicePart.GRAPH_POOLS, space.kept, "free, but in pools of CUDA graphs and MemPools"))
    if space.pending:
        parts.append(Part(DevicePart.PENDING, space.pending, _PENDING))
    return (*parts, *_rest(device, pid, space.reserved))


def _by_counters(device: DeviceFacts, stats: AllocatorStats, allocated: int) -> list[Part]:
    """Return the parts of the memory that is reserved and not `allocated`, as far as counters tell them apart."""
    if stats.active is None or stats.inactive_split is None:
        return [Part(DevicePart.CACHED, max(0, stats.reserved - allocated), "reserved and free")]
    releasable, pending = stats.reserved - stats.active - stats.inactive_split, stats.active - allocated
    parts = [
        _bounded(device, Part(DevicePart.RELEASABLE, releasable, _RELEASABLE)),
        _bounded(device, Part(DevicePart.STRANDED, stats.inactive_split, _STRANDED)),
    ]
    return [*parts, Part(DevicePart.PENDING, pending, _PENDING)] if pending else parts


def bound_of(device: DeviceFacts, part: str) -> str:
    """Return `at most` or `at least` where the figure of a part is a bound, else an empty string.

    PyTorch counts nothing in expandable segments as split: there a part of the seemingly releasable memory is stranded.
    """
    bounds = {DevicePart.RELEASABLE.value: "at most", DevicePart.STRANDED.value: "at least"}
    return bounds.get(part, "") if device.segments is None and "expandable_segments:True" in device.settings else ""


def _bounded(device: DeviceFacts, part: Part) -> Part:
    bound = bound_of(device, part.name)
    return replace(part, note=f"{bound}; {part.note}") if bound else part


def _rest(device: DeviceFacts, pid: int, reserved: int) -> list[Part]:
    """Return the parts outside of our allocator's `reserved` memory, or none where the device's size is not known."""
    if device.total is None or device.free is None:
        return []
    outside = max(0, device.total - device.free - reserved)
    return [*_outside(device, pid, outside, reserved), Part(DevicePart.FREE, device.total - reserved - outside)]


def _outside(device: DeviceFacts, pid: int, outside: int, reserved: int) -> list[Part]:
    """Tell the bytes in use outside our allocator apart, as far as the driver lists processes.

    In containers it lists none, or under pids of the host: then a single process must be this one, and of several none can
    be told to be. Memory of no process is the driver's own.
    """
    unknown = [Part(DevicePart.OUTSIDE, outside, "other processes and CUDA contexts; the driver does not say which")]
    told = _told_apart(device, pid)
    if told is None:
        return unknown
    mine, others = told
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
    parts = [Part(DevicePart.CONTEXT, context, "CUDA itself in this kernel")] if mine else []
    parts.append(Part(DevicePart.OTHERS, theirs, _in_brief(others)))
    return [*parts, Part(DevicePart.DRIVER, driver, "in use, but by no process that the driver lists")] if driver else parts


def _told_apart(device: DeviceFacts, pid: int) -> tuple[list[ProcessFact], list[ProcessFact]] | None:
    """Return (this process, the others) of a device, each as the driver lists it; None where they cannot be told apart."""
    processes = None if device.nvml is None else device.nvml.processes
    if processes is None:
        return None
    mine = [process for process in processes if process.pid == pid]
    if device.has_context and not mine:
        if len(processes) != 1:
            return None
        mine = list(processes)
    return mine, [process for process in processes if process not in mine]


def other_processes(device: DeviceFacts, pid: int) -> tuple[ProcessFact, ...]:
    """Return the other processes on a device, the largest first; none where the driver does not tell them apart."""
    told = _told_apart(device, pid)
    return () if told is None else tuple(sorted(told[1], key=lambda process: -(process.used or 0)))


def by_identity(processes: Sequence[ProcessFact]) -> list[list[ProcessFact]]:
    """Return the processes by who they are, the largest group first; one of which nothing is known is alone."""
    groups: dict[str | int, list[ProcessFact]] = {}
    for process in processes:
        groups.setdefault(_name(process) or process.pid, []).append(process)
    return sorted(groups.values(), key=lambda group: -sum(process.used or 0 for process in group))


def processes_words(processes: Sequence[ProcessFact]) -> str:
    """Return who the processes are, with bytes and pids, by notebook or program, the largest first."""
    groups = by_identity(processes)
    said = [_group_words(_name(group[0]), group) for group in groups[:_NAMED]]
    if rest := groups[_NAMED:]:
        said.append(_group_words(f"{len(rest)} more", [process for group in rest for process in group]))
    return ", ".join(said)


def _in_brief(processes: Sequence[ProcessFact]) -> str:
    """Return who the processes are by the files' names alone, for a note; their number where nobody knows of any."""
    if not _is_known(processes):
        return counted(len(processes), "other process", "other processes")
    groups = by_identity(processes)
    names = [group[0].identity.short if group[0].identity else "" for group in groups]
    if len(groups) == 1:
        return names[0]
    rows = zip(names[:_NAMED], groups, strict=False)
    said = [f"{name or pids_text([each.pid for each in group])} {_bytes_words(group)}" for name, group in rows]
    return ", ".join([*said, *([f"{len(groups) - _NAMED} more"] if len(groups) > _NAMED else [])])


def _name(process: ProcessFact) -> str:
    return "" if process.identity is None else process.identity.words


def others_line(others: Sequence[ProcessFact]) -> str:
    """Return the line that says who the other processes on a device are; empty where nobody knows of any."""
    return f"others: {processes_words(others)}" if _is_known(others) else ""


def _is_known(processes: Sequence[ProcessFact]) -> bool:
    """Say whether it is known of any of the processes who it is."""
    return any(map(_name, processes))


def _group_words(name: str, group: Sequence[ProcessFact]) -> str:
    return f"{name} {_bytes_words(group)} ({pids_text([each.pid for each in group])})".lstrip()


def _bytes_words(group: Sequence[ProcessFact]) -> str:
    known = [process.used for process in group if process.used is not None]
    return format_bytes(sum(known)) if len(known) == len(group) else "?"
