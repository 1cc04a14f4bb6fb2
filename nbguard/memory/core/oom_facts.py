"""Facts of an out-of-memory error, found in its text, in its frames, and to an observer at the moment of the failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from nbguard.units import format_bytes

OomKind = Literal["device", "library", "host", "worker", "shm"]
"""Who had no memory to give: PyTorch's allocator of a device; the driver, asked by a library of CUDA's; the host; the host,
asked by a DataLoader worker that was killed for it; shared memory, that such workers hand batches over in."""

HOST_KINDS: frozenset[str] = frozenset({"host", "worker", "shm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorCounts:
    """Counters of one device's allocator at one moment, in bytes unless said otherwise, by their names in torch."""

    allocated: int = 0  # allocated_bytes.all.current
    reserved: int = 0  # reserved_bytes.all.current
    made: int = 0  # allocated_bytes.all.allocated: of all blocks that were ever handed out
    made_blocks: int = 0  # allocation.all.allocated: number of these blocks
    retries: int = 0  # num_alloc_retries: how often the cache was emptied because a request failed
    failures: int = 0  # num_ooms: requests that failed, also those whose error was caught
    collections: int = 0  # full runs of Python's collector, as gc.get_stats() counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class OomNote:
    """The allocator at the failure, before any frame was unwound. All sizes are bytes.

    As its observer saw it; or as the error's text has it: then sizes are up to `slack` larger, and there are no peaks.
    """

    device: str  # that ran out: `cuda:0`
    requested: int  # the segment that the allocator asked the device for: the request, rounded up
    total: int | None  # the device's size
    free: int  # free on the device
    limit: int | None  # bytes that the process may reserve, if that is less than the device
    allocated: int  # allocated_bytes.all.current
    reserved: int  # reserved_bytes.all.current
    peak_allocated: int | None = None  # allocated_bytes.all.peak
    peak_reserved: int | None = None  # reserved_bytes.all.peak
    stranded: int | None = None  # free between live blocks; None, as the two below, where blocks were not read
    largest_free: int | None = None  # largest free block of the default stream
    pages: int | None = None  # whole pages in stranded memory
    unread: str = ""  # why blocks were not read
    settings: str = ""  # of the allocator
    cell: int | None = None  # number of the cell that ran
    time: float | None = None  # seconds since 1970
    slack: int = 0  # bytes that sizes may be larger, as texts round them
    counts: AllocatorCounts | None = None  # the counters at the failure; None where only the error's text tells


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Memory of the host as this process may use it, in bytes; None where it does not apply or cannot be read."""

    total: int | None = None  # of the machine
    available: int | None = None  # without swapping (/proc/meminfo MemAvailable)
    group_limit: int | None = None  # of the container (cgroup) that leaves least
    group_room: int | None = None  # left in that container
    address_limit: int | None = None  # RLIMIT_AS
    address_room: int | None = None  # left of RLIMIT_AS
    shm_total: int | None = None  # of /dev/shm
    shm_free: int | None = None  # of /dev/shm

    @property
    def room(self) -> int | None:
        """Return the bytes that one allocation can get: the least that the machine, the container and the limit leave."""
        rooms = [room for room in (self.available, self.group_room, self.address_room) if room is not None]
        return min(rooms, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierFailure:
    """An earlier run of the same cell's source that ran out of memory of the same device. All sizes are bytes."""

    cell: int  # number of that run
    requested: int  # the segment that the allocator asked the device for
    taken: int  # in use at the failure beyond the bytes at that run's beginning
    made: int  # of all blocks that were handed out during that run
    made_blocks: int  # number of these blocks
    peak: int  # the most that was ever in use until that failure (allocated_bytes.all.peak)
    needed: int | None = None  # bytes that this run needed at the same time, at least, this request among it; None if unknown
    is_of_same_inputs: bool = False  # the cell's inputs were the same then: numbers, strings, functions, modules, classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """The container that a failed run filled, as one would write it, and its contents."""

    name: str
    elements: int  # 0 if joined to one tensor
    nbytes: int  # where the request was made
    keeps_graph: bool = False  # its elements keep autograd graphs
    less: str = ""  # the way to have a library keep less; "": the user's own loop fills it

    def words(self, *, trains: bool, is_left: bool) -> str:
        """Return the words on the growing container, its growth, and the remedy.

        Args:
            trains: the run calls backward.
            is_left: the container is there still.
        """
        number = f"{self.elements} tensors, " if self.elements else ""
        own = "append loss.item() or t.detach()" if self.keeps_graph and trains else "append t.detach().cpu(), or keep less"
        when = "by now" if is_left else "by then"
        return f"{self.name} grows: {number}{format_bytes(self.nbytes)} {when}; {self.less or own}"


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the user's code."""

    cell: int | None  # number of its cell; None in a script
    number: int  # of the line in the cell or the file
    text: str = ""
    file: str = ""  # name of the file, of an error that ends its process


def device_that_ran_out(oom: OomFact, devices: Iterable[str]) -> str | None:
    """Return which of `devices` an error ran out of; None for the host, and where the error's text leaves it open."""
    if oom.kind in HOST_KINDS:
        return None
    named = [device for device in devices if oom.device in (device, "", device.partition(":")[0])]
    return named[0] if len(named) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomFact:
    """The last error, where it ran out of memory. All sizes are bytes."""

    device: str  # as the text names it: `cuda:0`, `cuda`, `cpu`; empty where it names none
    requested: int | None  # as the text has it: of PyTorch's errors the segment asked for; None where it does not say
    slack: int = 0  # how many bytes more `requested` may be, as texts are rounded to hundredths
    kind: OomKind = "device"  # who had no memory to give
    limit: int | None = None  # bytes that the process may reserve at most, as the text says
    error: str = "OutOfMemoryError"  # name of the error's type
    shown: str = ""  # type of the error that was raised because of it or after it; empty for the same error
    cell: int | None = None  # number of the cell that ran
    line: CodeLine | None = None  # deepest line of the user's own
    uses: tuple[str, ...] = ()  # names that the run reads
    bound: tuple[str, ...] = ()  # names that the run had bound before it failed
    makes: tuple[str, ...] = ()  # of these, the names that a run binds before anything reads them: deleting one costs nothing
    reaches: tuple[str, ...] | None = ()  # names that any code of the run may have reached; None if it may have been any name
    replaces: tuple[str, ...] = field(default=(), metadata={"json": False})
    """Names whose present values no whole run of the cell can read, as it binds each of them first."""
    start: AllocatorCounts | None = None  # the counters of the device when the cell began; None if they were not read
    has_replaced: bool = False  # a name that the cell found was bound to something else before the failure
    elements: int | None = None  # number of elements of the list that the failing line builds; None if unknown
    earlier: tuple[EarlierFailure, ...] = ()  # failed runs of the same source before this one, the oldest first
    goes_on: bool = False  # after the request, the cell may allocate more, of an unknown number of bytes
    learner: int = 0  # ref of the Learner in the error's frames; 0 if none
    batch_size: int | None = None  # of that Learner
    guard: Literal["", "callback", "itself", "model", "parts"] = field(default="", metadata={"json": False})
    """Guard that would let the training go on in pieces, as of `ExperimentClass`; `parts` for a loop of one's own; empty where
    there is no training, or it is known that it would be refused."""

    runs_model: bool = False  # a module's forward, autograd's backward or an optimizer's step was running
    fills: tuple[str, ...] = ()  # names of containers that a loop of the user's, around the model where one ran, puts things in
    trains: bool = True  # False: nothing that ran then, nor the cell, calls a backward pass
    was_released: bool = False  # a cleanup took the frames' variables since
    is_final: bool = False  # it ends its process: nothing can be run there any more, only the next run can do better
    has_passed: bool = False  # the cell has run through since
    is_outlived: bool = False  # another cell, which a device gave memory, has run through since
    growing: Growing | None = field(default=None, metadata={"json": False})  # met right after the failure; None if none was
    had_graph: bool = field(default=False, metadata={"json": False})  # the run held an autograd graph right after the failure
    note: OomNote | None = None  # the allocator at the failure
    host: HostFacts | None = None  # the host's memory now, where it ran out
