"""What the probes found, as frozen plain data: ints, strings and tuples of them, never a user's object.

All sizes are bytes. A reading that could not be made is None, with an `Unavailable` that says why; never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nbguard.memory.oom_facts import OomFact
from nbguard.memory.processes import WorkersFact

RootKind = Literal["name", "module", "frame", "out", "error", "cache", "garbage", "library"]
"""Where references start. The first three are the user's own; `out`, `error`, `cache` and `garbage` are what a cleanup may
let go; `library` is what other code holds on to."""

NodeKind = Literal[
    "learner",
    "model",
    "optimizer",
    "loader",
    "iterator",
    "tensor",
    "pool",
    "graph",
    "frame",
    "locals",
    "traceback",
    "cell",
    "code",
    "data",
    "object",
]
DEBUGGER = "ended debugger"
"""Label of the root that stands for a debugger whose session has ended and that running frames still know."""

IN_THREAD = " in thread "
"""How the label of a running function says that it runs in another thread than the one that looks."""

EXPERIMENT_KINDS: frozenset[str] = frozenset({"learner", "model", "optimizer", "loader", "iterator"})
KEPT_KINDS: frozenset[str] = EXPERIMENT_KINDS | {"pool"}
"""What a graph knows of even where it leads to no storage; a `pool` is a CUDAGraph or MemPool."""


PoolId = tuple[int, int]
"""How torch numbers a pool of the allocator; (0, 0) is everybody's."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A reading that could not be made, and why, in words for the user."""

    probe: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a segment. `state` as torch spells it: active_allocated, active_pending_free, inactive.

    `requested` is what was asked for, before rounding; 0 where this torch does not say. `site` is the line that allocated it,
    in words, where the allocator's history is recorded.
    """

    address: int
    size: int
    state: str
    requested: int = 0
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One driver allocation of the caching allocator. `stream` is the address of the stream it serves (0: the default one).

    `pool` is (0, 0) but for private pools: those of CUDA graphs and MemPools.
    """

    address: int
    total_size: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[Block, ...]
    stream: int = 0
    pool: PoolId = (0, 0)

    @property
    def is_private(self) -> bool:
        """Return whether only a CUDA graph or a MemPool may use it."""
        return self.pool != (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorStats:
    """Counters of the caching allocator on one device, in bytes, as `torch.cuda.memory_stats` defines them.

    `active` and `inactive_split` are None where nobody asked for them: segments tell more.
    """

    allocated: int
    reserved: int
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    active: int | None = None
    inactive_split: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessFact:
    """A process that uses the device, as the driver sees it. `used` is None where the driver does not say."""

    pid: int
    used: int | None


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What the driver says about one device: bytes of all its processes together."""

    total: int
    used: int
    processes: tuple[ProcessFact, ...] | None
    is_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device as this process sees it. `allocator` is None until torch has used the device.

    `workspace` is the size of the workspaces that torch keeps for cuBLAS; `has_context` is False for a device that this
    process has not opened. `limit` is what torch may reserve (its memory fraction); None where torch does not tell.
    """

    device: str
    name: str
    total: int | None = None
    free: int | None = None
    allocator: AllocatorStats | None = None
    segments: tuple[Segment, ...] | None = None
    nvml: NvmlFacts | None = None
    settings: str = ""
    workspace: int | None = None
    has_context: bool = True
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class PinnedFacts:
    """Page-locked host memory of torch's pinned allocator: in use by tensors or copies, and held in all."""

    active: int
    reserved: int


@dataclass(frozen=True, slots=True)
class StorageFact:
    """Memory that tensors share, counted once. `nbytes` is what the allocator set aside for it, where that is known.

    A storage on a device whose blocks are known, and that lies in none of them, is not of torch's allocator: 0 bytes.
    """

    device: str
    nbytes: int
    address: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A place where references start.

    `label` is what the user calls it (`learn`, `Out[12]`, `last error`), `cell` the number of the cell it stems from,
    `nodes` the graph nodes that it refers to, `count` how many objects a garbage or library root stands for.
    """

    kind: RootKind
    label: str
    nodes: tuple[int, ...]
    cell: int | None = None
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One Python object on a path to a tracked storage. `ref` is its id while it lived; it is never dereferenced.

    `children` are node numbers, `labels` how each is reached (`.model`, `[3]`), `storages` what it holds directly.
    """

    kind: NodeKind
    type_name: str
    ref: int
    children: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    storages: tuple[int, ...] = ()

    @property
    def references(self) -> Iterator[tuple[int, str]]:
        """Return (child, label) of each reference."""
        return zip(self.children, self.labels, strict=True)


@dataclass(frozen=True, slots=True)
class Graph:
    """Who refers to whom, reduced to the objects that lead to a tracked storage or an experiment.

    `rest` is the number of the node that stands for all that was not looked into, None if all was: whatever leads to it holds
    at least what is known of it. What the rest itself leads to it may hold: it comes back only if the rest goes, too.
    """

    roots: tuple[Root, ...] = ()
    nodes: tuple[Node, ...] = ()
    storages: tuple[StorageFact, ...] = ()
    rest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwalkedFact:
    """What one look left out, so that its figures are lower bounds.

    `operations` are the nodes of autograd graphs that it went into; `graphs_cut` counts the places where it ended before
    the graph did, and `operations_at_most` bounds the operations of these graphs, by torch's own number of the latest
    (0: not known).
    `tensors` are those that it looked into, `tensors_left` the references it met to others.
    """

    graphs_cut: int = 0
    operations: int = 0
    operations_at_most: int = 0
    tensors: int = 0
    tensors_left: int = 0


@dataclass(frozen=True, slots=True)
class LearnerFact:
    """A fastai Learner: its node, whether a fit runs on it now, and what it is made of."""

    node: int
    is_running: bool
    summary: str
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolFact:
    """A private pool and the nodes of the objects (CUDAGraph, MemPool) that keep it in use: its segments stay until they go."""

    pool: PoolId
    keepers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParkedFact:
    """What was moved to host memory under one name (`--park learn`): bytes, and how many tensors share them."""

    label: str
    device: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything one look at the process found. `changed`: another thread allocated or freed while it was made.

    `has_compiled`: torch.compile has been used in this process.
    """

    tracked: str
    devices: tuple[DeviceFacts, ...] = ()
    graph: Graph = field(default_factory=Graph)
    learners: tuple[LearnerFact, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    pid: int = 0
    frozen_objects: int = 0
    is_autocast_on: bool = False
    pools: tuple[PoolFact, ...] = ()
    pinned: PinnedFacts | None = None
    oom: OomFact | None = None
    parked: tuple[ParkedFact, ...] = ()
    changed: bool = False
    has_compiled: bool = False
    workers: tuple[WorkersFact, ...] = ()
    unwalked: UnwalkedFact | None = None
