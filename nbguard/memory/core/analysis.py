"""The analysis of one scan, its conclusions each computed once, when first asked for, with the parts of a device's memory.

All readers of the same facts get the same analysis: the report, its findings, the map, the card after an
out-of-memory error, the sidebar. So no two of them can give two answers to one question.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar, cast

from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, Facts, Graph, LibraryPool, PoolId, ProcessFact
from nbguard.memory.core.fragmentation import Fragmentation, fragmentation
from nbguard.memory.core.oom_facts import device_that_ran_out
from nbguard.memory.core.pinning import Unit, units
from nbguard.memory.core.processes import pids_text
from nbguard.memory.core.references.holders import Holding, holdings
from nbguard.memory.core.references.owner_sets import owners_of_nodes, owners_of_storages
from nbguard.memory.core.requests import LargestRequest, Pool, RequestLimits, Room, pools_in_use, pools_of
from nbguard.units import counted, format_bytes

# --- The parts of a device's memory (of this process's allocator, of others, and free), which add up to the device's size.


class DevicePart(str, Enum):
    """The key of a part, in JSON and on the wire to a sidebar: it stays when the words for people change."""

    ALLOCATED = "allocated"  # in tensors and other live blocks (allocated_bytes.all.current)
    RELEASABLE = "releasable"  # reserved and free, and `torch.cuda.empty_cache()` gives it back
    STRANDED = "stranded"  # reserved and free, but a live block keeps its segment
    GRAPH_POOLS = "graph pools"  # reserved and free, but only for the CUDA graph or MemPool whose pool it is or may still be
    PENDING = "pending"  # freed, but another stream may still use it
    CACHED = "cached"  # reserved and free, where nothing tells how much of it is releasable
    CONTEXT = "context"  # CUDA itself in this process: what NVML counts for it beyond what is reserved
    LIBRARIES = "libraries"  # other libraries in this process, as they count it themselves
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
    DevicePart.LIBRARIES: "other libraries",
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


def parts_of(
    device: DeviceFacts, allocated: int, pid: int, in_use: Collection[PoolId], space: Fragmentation | None = None
) -> tuple[Part, ...]:
    """Return the parts of `device`; `allocated`: bytes of its holders, `in_use`: private pools that an object keeps.

    They add up to the device's size; spilled bytes come last, beyond it. `space` is that of its segments, if known already.
    """
    spilled = 0 if device.airbag is None else device.airbag.spilled
    parts = _parts_of(device, allocated, pid, in_use, space)
    return (*parts, Part(DevicePart.SPILLED, spilled, "in host memory: the airbag's")) if spilled else parts


def _parts_of(
    device: DeviceFacts, allocated: int, pid: int, in_use: Collection[PoolId], space: Fragmentation | None
) -> tuple[Part, ...]:
    if device.allocator is None:
        return (Part(DevicePart.ALLOCATED, allocated), *_rest(device, pid, 0))
    if device.segments is None:
        cache = _by_counters(device, device.allocator, allocated)
        return (Part(DevicePart.ALLOCATED, allocated), *cache, *_rest(device, pid, device.allocator.reserved))
    space = fragmentation(device.segments, in_use=in_use) if space is None else space
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
    pools = min(outside, sum(pool.held for pool in device.library_pools))
    own = [Part(DevicePart.LIBRARIES, pools, _pools_in_brief(device.library_pools))] if pools else []
    free = Part(DevicePart.FREE, device.total - reserved - outside)
    return [*own, *_outside(device, pid, outside - pools, reserved + pools), free]


def _pools_in_brief(pools: Sequence[LibraryPool]) -> str:
    """Return each library with the bytes of its pool, and of those in use where they are fewer."""
    said = []
    for pool in pools:
        used = f" ({format_bytes(pool.used)} in use)" if pool.unused else ""
        said.append(f"{pool.library} {'' if pool.is_whole else 'at least '}{format_bytes(pool.held)}{used}")
    return ", ".join(said)


def _outside(device: DeviceFacts, pid: int, outside: int, reserved: int) -> list[Part]:
    """Tell the bytes in use outside all known allocators apart, as far as the driver lists processes.

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
    """Return the processes by who they are, the largest group first; a process that nothing is known about is alone."""
    groups: dict[str | int, list[ProcessFact]] = {}
    for process in processes:
        groups.setdefault(_name(process) or process.pid, []).append(process)
    return sorted(groups.values(), key=lambda group: -sum(process.used or 0 for process in group))


def processes_words(processes: Sequence[ProcessFact]) -> str:
    """Return who the processes are, with bytes and pids, by notebook or program, the largest first."""
    groups = by_identity(processes)
    said = [_group_words(name, group) for name, group in zip(_names(groups), groups[:_NAMED], strict=False)]
    if rest := groups[_NAMED:]:
        said.append(_group_words(f"{len(rest)} more", [process for group in rest for process in group]))
    return ", ".join(said)


def _names(groups: Sequence[Sequence[ProcessFact]]) -> list[str]:
    """Return the names of groups: notebooks by their files alone, as reports are shared, with folders where two are alike."""
    identities = [group[0].identity for group in groups]
    names = ["" if each is None else each.name() for each in identities]
    return [
        name if each is None or names.count(name) == 1 else each.name(folders=1)
        for name, each in zip(names, identities, strict=True)
    ]


def _in_brief(processes: Sequence[ProcessFact]) -> str:
    """Return who the processes are by the files' names alone, for a note; their number where no file is known."""
    if not _is_known(processes):
        return counted(len(processes), "other process", "other processes")
    groups = by_identity(processes)
    names = _names(groups)
    if len(groups) == 1:
        return names[0]
    rows = zip(names[:_NAMED], groups, strict=False)
    said = [f"{name or pids_text([each.pid for each in group])} {_bytes_words(group)}" for name, group in rows]
    return ", ".join([*said, *([f"{len(groups) - _NAMED} more"] if len(groups) > _NAMED else [])])


def _name(process: ProcessFact) -> str:
    return "" if process.identity is None else process.identity.words


def others_line(others: Sequence[ProcessFact]) -> str:
    """Return the line that says who the other processes on a device are; empty where none is known."""
    return f"others: {processes_words(others)}" if _is_known(others) else ""


def _is_known(processes: Sequence[ProcessFact]) -> bool:
    """Say whether it is known of any of the processes who it is."""
    return any(map(_name, processes))


def _group_words(name: str, group: Sequence[ProcessFact]) -> str:
    return f"{name} {_bytes_words(group)} ({pids_text([each.pid for each in group])})".lstrip()


def _bytes_words(group: Sequence[ProcessFact]) -> str:
    known = [process.used for process in group if process.used is not None]
    return format_bytes(sum(known)) if len(known) == len(group) else "?"


Answer = TypeVar("Answer")


class _Answers:
    """Answers to questions of rooms above this one, each asked once."""

    def __init__(self, answers: Mapping[Callable[[Any], object], object] | None = None) -> None:
        self._answers = dict(answers or {})

    def _answer(self, question: Callable[[Any], Answer]) -> Answer:
        if question not in self._answers:
            self._answers[question] = question(self)
        return cast("Answer", self._answers[question])


class Analysis(_Answers):
    """The facts of one scan, and the answers computed from them. Not for several threads at a time."""

    def __init__(self, facts: Facts, answers: Mapping[Callable[[Any], object], object] | None = None) -> None:
        super().__init__(answers)
        self.facts = facts

    def once(self, question: Callable[[Analysis], Answer]) -> Answer:
        """Return the answer of the function `question` on this analysis, computed at the first call and then remembered."""
        return self._answer(question)

    def know(self, question: Callable[[Analysis], object], answer: object) -> None:
        """Have `once` return this answer to a question that the facts alone do not decide, from now on."""
        self._answers[question] = answer

    def with_graph(self, graph: Graph, *keep: Callable[[Analysis], object]) -> Analysis:
        """Return an analysis of the same facts by another graph, with the same answers to `keep`."""
        return Analysis(replace(self.facts, graph=graph), {question: self.once(question) for question in keep})

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """Return the holders among Python's objects on all devices together, each with its storages."""
        return holdings(self.facts.graph)

    @cached_property
    def node_owners(self) -> list[int]:
        """Return the roots that lead to each node, as the bits of a number."""
        return owners_of_nodes(self.facts.graph, [root.nodes for root in self.facts.graph.roots])

    @cached_property
    def storage_owners(self) -> list[int]:
        """Return the roots that lead to each storage, as the bits of a number."""
        return owners_of_storages(self.facts.graph, self.node_owners)

    @cached_property
    def pools_in_use(self) -> frozenset[PoolId]:
        """Return the private pools of the allocator that a CUDA graph or a MemPool keeps in use."""
        return pools_in_use(self.facts)

    @cached_property
    def devices(self) -> tuple[DeviceAnalysis, ...]:
        """Return the analysis of each device, in the order of the facts."""
        return tuple(DeviceAnalysis(self, device) for device in self.facts.devices)

    @cached_property
    def device_that_ran_out(self) -> DeviceAnalysis | None:
        """Return the device that the last error ran out of; None for the host, and where it is not known which it was."""
        failed = None if self.facts.oom is None else device_that_ran_out(self.facts.oom, [d.name for d in self.devices])
        return next((device for device in self.devices if device.name == failed), None)


class DeviceAnalysis(_Answers):
    """One device of an analysis."""

    def __init__(self, analysis: Analysis, facts: DeviceFacts) -> None:
        super().__init__()
        self.analysis: Analysis = analysis
        self.facts: DeviceFacts = facts

    def once(self, question: Callable[[DeviceAnalysis], Answer]) -> Answer:
        """Return the answer of the function `question` on this device, computed at the first call and then remembered."""
        return self._answer(question)

    @property
    def name(self) -> str:
        """Return the device's name in torch: `cuda:0`."""
        return self.facts.device

    @cached_property
    def holdings(self) -> tuple[Holding, ...]:
        """Return the holders among Python's objects of bytes on this device, each with its storages here."""
        graph = self.analysis.facts.graph
        is_alone = all(storage.device == self.name for storage in graph.storages)
        return self.analysis.holdings if is_alone else holdings(graph, self.name)

    @cached_property
    def space(self) -> Fragmentation:
        """Return the fragmentation of all segments; all figures are 0 where the segments are not known."""
        return fragmentation(self.facts.segments or (), in_use=self.analysis.pools_in_use)

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Return the allocator's pools by name; none where its segments are not known."""
        return pools_of(self.analysis.facts, self.facts)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Return the segments, and the stretches of pages, that have live blocks: each goes back to the device as one."""
        return tuple(units(self.facts.segments or (), self.analysis.pools_in_use))

    @cached_property
    def room(self) -> Room:
        """Return the room for requests of the default stream. Where torch does not tell its limit, the last error may."""
        oom, device = self.analysis.facts.oom, self.facts
        if device.limit is None and oom is not None and self is self.analysis.device_that_ran_out:
            device = replace(device, limit=oom.limit)
        return Room(device=device, in_use=self.analysis.pools_in_use)

    @cached_property
    def limits(self) -> RequestLimits:
        """Return the limits of the largest request, apart from the device's free memory."""
        return self.room.limits()

    @cached_property
    def largest(self) -> LargestRequest:
        """Return the largest request that would succeed now, and the largest free block."""
        return self.limits.largest(self.facts.free)
