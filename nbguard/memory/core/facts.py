"""Facts of one scan and targets of a cleanup, as frozen plain data, that is, ints, strings and tuples of them.

All sizes are bytes. A reading that could not be made is None, with an `Unavailable` that says why; never 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.core.processes import Identity, WorkersFact
from nbguard.units import MiB

# --- A target of a cleanup, which is a name or expression that the user asked to free.


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A name or expression that the user asked to free, as far as it could be looked up without running user code.

    Without `root` and without `containers` (a computed key, say) the bytes cannot be promised, only measured.
    """

    text: str  # as the user wrote it
    root: str = ""  # label of the root that goes: a plain name, `Out[3]`
    containers: tuple[int, ...] = ()  # else ids of the objects whose reference `del` would remove
    value: int = 0  # id of the object that they refer to
    value_kind: str = ""  # that object in a few words
    step: str = field(default="", metadata={"json": False})
    """How the reference that goes is written, of a path that only a report knows; empty where `del` takes it away."""
    line: str = field(default="", metadata={"json": False})  # code that ends a library's hold on its root instead
    lets_go: bool = field(
        default=False, metadata={"json": False}
    )  # its root, such as the last error, lets go of it by itself: there is nothing to delete
    hook: str = field(
        default="", metadata={"json": False}
    )  # in words, a hook of a module that uses the name; empty without one
    hooked: int = field(default=0, metadata={"json": False})  # id of that module
    turn: tuple[int, int] = field(default=(0, 0), compare=False, metadata={"json": False})
    """Order of deletion, the least first: parts before their wholes, and the last element of a list first."""

    @property
    def is_known(self) -> bool:
        """Return whether the references that go are known beforehand."""
        return bool(self.root or self.lets_go or (self.containers and self.value))


RootKind = Literal["name", "module", "frame", "out", "error", "cache", "garbage", "library"]
"""Where references start. The first three are the user's own; a cleanup may release `out`, `error`, `cache` and `garbage`;
`library` stands for other code that holds on to objects."""

CacheKind = Literal["", "garbage", "run", "store", "figure", "cycle"]
"""The cache that a root of the kind `cache` stands for: gc.garbage, IPython's of `%run`'s scripts, its `%store` database's,
pyplot's open figures; a cycle through C++ that nothing else leads to, and that Python's collector cannot see."""

Registry = Literal["", "atexit", "task", "timer", "thread", "logger"]
"""The part of Python that a root of the kind `library` stands for: a function registered with `atexit`, a task or timer of an
event loop, the context of a thread, or an attribute of a logger or of its handler."""

HolderSource = Literal["python", "workspaces", "graphs", "site", "unknown", "pending", "changed", "unrecorded"]
"""Source of a holder: a Python object; or, of blocks without one, cuBLAS as a workspace, a CUDA graph's pool, a known line of
C++ code, unknown C++ code, a stream that still uses them, another thread that allocated meanwhile; or the file does not say."""

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
ModulePart = Literal["", "parameters", "buffers", "modules"]
"""The dict of a torch module that an object is: all else that a module refers to is no part of the model."""

OwnEnd = Literal["", "reset", "reset_all", "delete_adapter"]
"""The method of a library's object that clears its collected values."""

DEBUGGER = "ended debugger"
"""Label of the root that stands for a debugger whose session ended and that running frames still know."""

EXPERIMENT_KINDS: frozenset[str] = frozenset({"learner", "model", "optimizer", "loader", "iterator"})
KEPT_KINDS: frozenset[str] = EXPERIMENT_KINDS | {"pool"}
"""Kinds that stay in a graph even where they lead to no storage; a `pool` is a CUDAGraph or MemPool."""


PoolId = tuple[int, int]
"""How torch numbers a pool of the allocator; (0, 0) is everybody's."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A reading that could not be made, and why, in words for the user."""

    probe: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a segment, as `torch.cuda.memory._snapshot()` lists them."""

    address: int  # on the device
    size: int  # bytes
    state: str  # as torch spells it: active_allocated, active_pending_free, inactive
    requested: int = 0  # bytes asked for, before rounding (requested_size); 0 where this torch does not tell
    site: str = ""  # line that allocated it, in words, where the allocator's history is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One driver allocation of the caching allocator."""

    address: int  # on the device
    total_size: int  # bytes
    is_small: bool  # it serves requests of up to 1 MiB (segment_type "small")
    is_expandable: bool  # it grows and shrinks by pages
    blocks: tuple[Block, ...]  # by address, without gaps
    stream: int = 0  # address of the stream that it serves; 0 for the default one
    pool: PoolId = (0, 0)  # segment_pool_id; other than (0, 0) only of CUDA graphs and MemPools

    @property
    def is_private(self) -> bool:
        """Return whether only a CUDA graph or a MemPool may use it."""
        return self.pool != (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AirbagFact:
    """Host memory that PyTorch falls back to where a device has no room (the airbag); no other figure of the device has it."""

    size: int  # bytes that are set aside
    spilled: int  # bytes of it that lie in live blocks
    segments: tuple[Segment, ...] = ()  # of the reserve; none where nobody asked


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorStats:
    """Counters of the caching allocator on one device, in bytes, from `torch.cuda.memory_stats`."""

    allocated: int  # allocated_bytes.all.current
    reserved: int  # reserved_bytes.all.current
    peak_allocated: int | None = None  # allocated_bytes.all.peak
    peak_reserved: int | None = None  # reserved_bytes.all.peak
    active: int | None = None  # active_bytes.all.current; None where nobody asked: segments tell more
    inactive_split: int | None = None  # inactive_split_bytes.all.current; None likewise


@dataclass(frozen=True, slots=True)
class ProcessFact:
    """A process that uses the device, as the driver sees it. `used` is None where the driver does not say."""

    pid: int
    used: int | None
    identity: Identity | None = None  # None: of this process, and where the driver's pids mean nobody here


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """The driver's figures of one device: bytes of all its processes together."""

    total: int
    used: int
    processes: tuple[ProcessFact, ...] | None
    is_mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device as this process sees it. All sizes are bytes."""

    device: str  # name in torch: `cuda:0`
    name: str  # name of the product
    total: int | None = None  # its size (cudaMemGetInfo, or NVML)
    free: int | None = None  # free on it (cudaMemGetInfo, or NVML)
    allocator: AllocatorStats | None = None  # None until torch has used the device
    segments: tuple[Segment, ...] | None = None  # None where this torch does not tell them
    nvml: NvmlFacts | None = None  # the driver's view; None without NVML
    settings: str = ""  # of the allocator, as PYTORCH_ALLOC_CONF writes them
    can_expand: bool = True  # False: expandable segments do not work on this system
    workspace: int | None = None  # size of a workspace that torch keeps for cuBLAS, one for each handle and stream
    lt_workspace: int | None = None  # size of those for cuBLASLt beside them; None if this torch keeps none
    has_context: bool = True  # False: this process has not opened the device
    airbag: AirbagFact | None = None  # the airbag that stands in for the device
    airbag_room: int = 0  # bytes of host memory that an airbag could take for it; 0 if it has one, or can have none here
    limit: int | None = None  # bytes that torch may reserve (its memory fraction); None where torch does not tell
    library_pools: tuple[LibraryPool, ...] = ()  # of other libraries in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryPool:
    """Memory of a device that another library has in this process, as the library counts it."""

    library: str  # its name, as its users write it
    held: int  # bytes that it took from the driver
    used: int  # bytes of its arrays
    is_whole: bool = True  # False: the library tells the bytes of its arrays alone, and `held` is those
    release: str = ""  # line of Python that gives unused bytes back; empty if only the end of the process does
    setting: str = ""  # environment variable with the value that makes it take what it needs; empty without one

    @property
    def unused(self) -> int:
        """Return the bytes that it keeps for later arrays."""
        return max(0, self.held - self.used)

    @property
    def returnable(self) -> int:
        """Return the bytes that it can give back, at most."""
        return self.unused if self.release else 0


@dataclass(frozen=True, slots=True)
class PinnedFacts:
    """Page-locked host memory of torch's pinned allocator (`torch.cuda.host_memory_stats`)."""

    active: int | None  # bytes in use by tensors or copies; None if this torch does not tell
    reserved: int  # bytes held in all, also those that are kept for later

    @property
    def unused(self) -> int | None:
        """Return the bytes that are kept for later; None where torch does not tell."""
        return None if self.active is None else self.reserved - self.active


@dataclass(frozen=True, slots=True)
class StorageFact:
    """Memory that tensors share, counted once. `nbytes` is the size that the allocator set aside for it, where that is known.

    A storage on a device whose blocks are known, and that lies in none of them, is not of torch's allocator: 0 bytes.
    """

    device: str
    nbytes: int
    address: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Return its identity (device, address) among those that are alive at the same time."""
        return self.device, self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A place where references start."""

    kind: RootKind  # which makes its bytes the user's own, stale, or a library's
    label: str  # the user's name for it: `learn`, `Out[12]`, `last error`
    nodes: tuple[int, ...]  # numbers of the graph's nodes that it refers to
    cell: int | None = None  # number of the cell that it stems from
    what: str = ""  # the object in a few words
    ended_by: str = ""  # line of code that ends a library's hold on it; empty where there is none
    module: str = ""  # module whose import makes the label an expression; empty if none is needed, or none does
    is_class: bool = False  # it is the attributes of a library's class
    thread: str = ""  # of a running function: the thread that runs it, if another than the one that scanned; or it is a thread
    registry: Registry = ""  # of a library: the part of Python that it stands for
    cache: CacheKind = ""  # of a cache: which one
    source: HolderSource = "python"  # who holds its bytes: another source only in a graph drawn from a snapshot file
    is_shown: bool = True  # False: something holds its objects that Python does not show
    is_ending: bool = False  # it lets go by itself, at the next turn of the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One Python object on a path to a tracked storage."""

    kind: NodeKind  # its name in words and plans
    type_name: str  # name of its class
    ref: int  # its id while it lived; it is never dereferenced
    children: tuple[int, ...] = ()  # numbers of the nodes that it refers to
    labels: tuple[str, ...] = ()  # how each child is reached: `.model`, `[3]`
    storages: tuple[int, ...] = ()  # numbers of the storages that it holds directly
    repeated: tuple[int, ...] = field(default=(), metadata={"json": False})  # children, for each reference but the first

    module_part: ModulePart = field(default="", metadata={"json": False})  # of the module that refers to it
    own_end: OwnEnd = field(default="", metadata={"json": False})  # its own method that clears its collected values
    is_foreign: bool = field(
        default=False, metadata={"json": False}
    )  # of a library: without its private attributes it is broken
    is_fixed: bool = field(default=False, metadata={"json": False})  # `del` takes none of its parts: a frozen class, an array

    @property
    def references(self) -> Iterator[tuple[int, str]]:
        """Return (child, label) of each reference."""
        return zip(self.children, self.labels, strict=True)

    @property
    def is_error(self) -> bool:
        """Say whether the node is an exception rather than the traceback of one."""
        return self.kind == "traceback" and self.type_name != "traceback"


@dataclass(frozen=True, slots=True)
class Graph:
    """The references between objects, among the objects that lead to a tracked storage or an experiment.

    `rest` is the number of the node that stands for all objects that the scan left out, None if there are none. A node that
    leads to it may hold more than is known. A storage that the rest leads to is freed only if the rest goes, too.
    """

    roots: tuple[Root, ...] = ()
    nodes: tuple[Node, ...] = ()
    storages: tuple[StorageFact, ...] = ()
    rest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnwalkedFact:
    """The part of the heap that one scan left out, so that its figures are lower bounds."""

    graphs_cut: int = 0  # places where the walk of an autograd graph ended before the graph did
    operations: int = 0  # nodes of autograd graphs that were walked
    operations_at_most: int = 0  # a bound of all nodes of these graphs, by `_sequence_nr()` of the latest; 0 if unknown
    tensors: int = 0  # tensors that the scan looked into
    tensors_left: int = 0  # references to tensors that were not


@dataclass(frozen=True, slots=True)
class UnreadFact:
    """Objects of one type that the scan could not look into, because PyTorch or their class refused."""

    type_name: str  # name of their class
    count: int  # of objects


@dataclass(frozen=True, slots=True)
class LearnerFact:
    """A Learner or Trainer: its node, whether a fit runs on it now, and its parts."""

    node: int
    is_running: bool
    names: tuple[str, ...]  # of its type, then of its parts: `("Learner", "Sequential", "Adam", "8 workers")`
    leftovers: tuple[str, ...] = ()  # attributes that its last batch or fit left on it

    @property
    def summary(self) -> str:
        """Return the Learner and its parts in words: `Learner · Sequential · Adam · 8 workers`."""
        return " · ".join(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFact:
    """A private pool and the nodes of the objects (CUDAGraph, MemPool) that keep it in use: its segments stay until they go."""

    pool: PoolId
    keepers: tuple[int, ...]
    unnamed: tuple[int, ...] = ()  # those of the keepers that only libraries lead to, or garbage without memory of its own
    is_shared: bool = False  # more than named keepers may use it: PyTorch counts more, or a graph has captured nothing
    is_left: bool = False  # an empty cache gave nothing back of it though nothing named kept it, as after a capture that failed


@dataclass(frozen=True, slots=True)
class ParkedFact:
    """Tensors moved to host memory under one name (`--park learn`): bytes, and how many tensors share them."""

    label: str
    device: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts that one scan of the process found."""

    tracked: str  # kind of device whose tensors are tracked: `cuda`, `cpu`, `simulated`
    devices: tuple[DeviceFacts, ...] = ()  # of that kind
    graph: Graph = field(default_factory=Graph)  # of references from roots to storages
    learners: tuple[LearnerFact, ...] = ()  # Learners and Trainers in the graph
    gradient_calls: tuple[tuple[int, str], ...] = ()  # (node of a Learner, its own call that frees its gradients)
    unavailable: tuple[Unavailable, ...] = ()  # readings that could not be made
    pid: int = 0  # this process's
    frozen_objects: int = 0  # number of objects that gc.freeze() hides
    is_autocast_on: bool = False  # in the thread that scanned
    pools: tuple[PoolFact, ...] = ()  # private pools that are known to be in use; nothing tells of the others
    pinned: PinnedFacts | None = None  # torch's page-locked host memory; None where it is not in use
    oom: OomFact | None = None  # the last error, where it ran out of memory
    parked: tuple[ParkedFact, ...] = ()  # tensors that `--park` moved to host memory
    changed: bool = False  # another thread allocated or freed during the scan
    has_compiled: bool = False  # torch.compile has been used in this process
    known_leaks: tuple[tuple[str, str], ...] = ()  # (label of a root, sentence) of leaks that its library is known for
    workers: tuple[WorkersFact, ...] = ()  # worker processes of DataLoaders
    unwalked: UnwalkedFact | None = None  # parts that the scan left out; None if there are none
    unread: tuple[UnreadFact, ...] = ()  # objects that it could not look into
    fixed: tuple[tuple[int, str], ...] | None = None  # (storage, why it cannot be moved); None: that was not looked for


# --- Counters of allocators and of the process at one moment, for the hook after a cell, and for a tick.


NOTICED = MiB
"""Without an allocator's counters (CPU tensors), a change of the process's heap by so many bytes leads to a scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counters of the allocator of one device, in bytes, as `torch.cuda.memory_stats` names them."""

    device: str  # `cuda:0`
    allocated: int  # allocated_bytes.all.current
    reserved: int | None = None  # reserved_bytes.all.current
    peak: int | None = None  # allocated_bytes.all.peak: since the start, or since somebody reset it
    allocations: int | None = None  # allocation.all.allocated: all ever made; more than the present ones after frees


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters at one moment.

    `heap`: bytes in use by the whole process, where no device counts its own, as `source` tells them: "malloc", or
    "resident", which are not to be compared.
    """

    devices: tuple[Counted, ...] = ()
    heap: int | None = None
    source: str = ""

    def differs(self, other: Reading | None) -> bool:
        """Say whether memory has changed between two readings, as far as counters tell."""
        if other is None or self.devices != other.devices:
            return True
        if self.devices:
            return False
        grown = self.grown_since(other)
        return grown is None or abs(grown) >= NOTICED

    def grown_since(self, other: Reading) -> int | None:
        """Return the growth of the process in bytes, or None if it is unknown."""
        if self.heap is None or other.heap is None or self.source != other.source:
            return None
        return self.heap - other.heap

    def grown_by(self, before: Reading) -> int:
        """Return the growth of memory in bytes since a reading, as far as counters tell."""
        if self.devices:
            return sum(counted.allocated - before.of(counted.device).allocated for counted in self.devices)
        return self.grown_since(before) or 0

    def of(self, device: str) -> Counted:
        """Return the counters of `device`; a device that was not in use had nothing."""
        return next(
            (counted for counted in self.devices if counted.device == device),
            Counted(device=device, allocated=0, reserved=0, peak=0, allocations=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReading:
    """All counters of one tick."""

    tracked: str = ""  # kind of device whose tensors are tracked; empty before PyTorch is imported
    devices: tuple[DeviceFacts, ...] = ()  # with the counters of their allocators, without segments
    pid: int = 0  # of this process
    process: int | None = None  # bytes of the whole process, where no device counts its own
    source: str = ""  # of `process`: `malloc` (mallinfo2) or `resident` (pages in memory)
    counted: tuple[Counted, ...] = ()  # the same counters as a hook reads them, to compare; none where they are not counted

    @property
    def in_use(self) -> dict[str, int]:
        """Return the bytes in use by device: in tensors, or by the process; none of devices that this process has not used."""
        if self.process is not None:
            return {device.device: self.process for device in self.devices}
        return {
            facts.device: facts.allocator.allocated for facts in self.devices if facts.allocator and facts.allocator.reserved
        }

    @property
    def peak(self) -> int | None:
        """Return the most that was allocated on one device; None where no device counts it."""
        peaks = (device.allocator.peak_allocated for device in self.devices if device.allocator is not None)
        return max((peak for peak in peaks if peak is not None), default=None)
