"""Memory snapshots as frozen plain data, with segments, blocks, and the events and stacks of the trace as columns."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias, overload

from nbguard.memory.allocator.model.settings import PoolId
from nbguard.plain_data import Within

# --- The different stacks of a snapshot, each frame kept once and each stack as the numbers of its frames.


Frame = tuple[str, int, str]
"""(file, line, function)."""

Stack = tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Stacks(Sequence[Stack]):
    """A sequence of stacks that makes each one when it is asked for: most of a large snapshot's are never shown."""

    frames: tuple[Frame, ...] = ()  # each different frame once
    # Indices in `frames` of the frames of all stacks, innermost first, one stack after another.
    numbers: array[int] = field(default_factory=lambda: array("I"))
    # Of each stack, the end of its part of `numbers`.
    ends: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Stack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Stack]: ...
    def __getitem__(self, index: int | slice) -> Stack | Sequence[Stack]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start = self.ends[at - 1] if at else 0
        return tuple([self.frames[number] for number in self.numbers[start : self.ends[at]]])

    def with_frames(self, change: Callable[[Frame], Frame]) -> Stacks:
        """Return the same stacks with each frame replaced by the result of `change`."""
        return Stacks(tuple(map(change, self.frames)), self.numbers, self.ends)


# --- The events of a trace as columns of numbers, since a large trace has millions and most commands read none of them.


Event = tuple[str, int, int, int]
"""(action, address, bytes, stream) of an entry; the second of an `oom` is the device's free bytes, -1 if not recorded."""

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot"),
)
"""Actions of the allocator in a trace (`TraceEntry::Action`). Other entries, such as annotations, are only counted."""

CODES = {action: code for code, action in enumerate(ACTIONS)}


@dataclass(frozen=True, slots=True)
class Events(Sequence[Event]):
    """A sequence of events that makes each tuple when it is asked for."""

    actions: array[int] = field(default_factory=lambda: array("B"))  # index in `ACTIONS`
    addresses: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))  # bytes
    streams: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """The four columns, in the order of an event."""
        return self.actions, self.addresses, self.sizes, self.streams

    def extend(self, *columns: Iterable[int]) -> None:
        """Append events, given as codes of actions, addresses, sizes and streams."""
        for column, more in zip(self.columns, columns, strict=True):
            column.extend(more)

    def __len__(self) -> int:
        return len(self.actions)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice):
            return Events(*(column[index] for column in self.columns))
        return ACTIONS[self.actions[index]], self.addresses[index], self.sizes[index], self.streams[index]

    def __iter__(self) -> Iterator[Event]:
        return zip(map(ACTIONS.__getitem__, self.actions), self.addresses, self.sizes, self.streams, strict=True)


_Bytes: TypeAlias = Annotated[int, Within(0, 2**60)]
_Share: TypeAlias = Annotated[float, Within(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """One entry of a segment's "blocks" in a snapshot."""

    address: int  # "address"; in files of torch 2.0 the sum of the sizes before
    size: int  # bytes, "size"
    requested: int  # bytes, "requested_size": of the last request; without meaning in an inactive block
    state: str  # "state": "inactive", "active_allocated" or "active_pending_free"
    stack: int = -1  # index in `Snapshot.stacks` of "frames"; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """One entry of "segments": a classic segment, or one stretch of an expandable segment that has memory."""

    device: int  # "device"
    address: int  # "address"
    total_size: int  # bytes, "total_size"
    stream: int  # "stream": handle of the stream that the segment belongs to
    is_small: bool  # "segment_type" is "small": of the small half of its pool
    is_expandable: bool  # "is_expandable"
    pool: PoolId  # "segment_pool_id"
    blocks: tuple[SnapshotBlock, ...]  # "blocks", by address


@dataclass(frozen=True, slots=True)
class Trace:
    """The history of one device's allocator: one list of "device_traces"."""

    events: Sequence[Event] = ()  # oldest first
    pools: Sequence[PoolId] | None = None  # "pool_id" of each event; None where this torch does not write it
    stacks: Sequence[int] = ()  # of each event, the index in `Snapshot.stacks` of "frames"; -1: none
    left_out: int = 0  # entries that are no events of the allocator

    def at_hand(self) -> Trace:
        """Return the same trace with its events as tuples: a replay goes to and fro in it."""
        return replace(self, events=tuple(self.events))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """Facts that PyTorch's snapshots lack, from the sidecar file that nbguard writes. Lists are by device number."""

    torch_version: str | None = None  # `torch.__version__`; None if unknown
    settings: str | None = None  # of the allocator, as in `PYTORCH_ALLOC_CONF`; None if unknown
    totals: tuple[_Bytes, ...] = ()  # bytes of each device (`mem_get_info()[1]`)
    frees: tuple[_Bytes, ...] = ()  # free bytes of each device when the snapshot was taken (`mem_get_info()[0]`)
    fractions: tuple[_Share, ...] = ()  # share of each device that the process may take (`get_per_process_memory_fraction`)
    names: tuple[str, ...] = ()  # of each device (`get_device_name`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A memory snapshot of every device of a process."""

    segments: tuple[SnapshotSegment, ...]  # "segments", by device and address
    traces: tuple[Trace, ...] = ()  # "device_traces", by device number
    settings: str | None = None  # from "allocator_settings", as in `PYTORCH_ALLOC_CONF`; None if the file has none
    divisions: tuple[int, ...] | None = None  # "allocator_settings" → "roundup_power2_divisions", as a table of 16 entries
    stacks: Stacks = field(default_factory=Stacks)  # "frames" of blocks and events, each different stack once
    hints: frozenset[str] = frozenset()  # names of fields that only some versions of torch write
    sidecar: Sidecar = field(default_factory=Sidecar)  # facts from the sidecar file; empty without one

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices that have a segment or an event."""
        traced = {number for number, trace in enumerate(self.traces) if trace.events}
        return tuple(sorted(traced | {segment.device for segment in self.segments}))

    def trace(self, device: int) -> Trace:
        """Return the trace of a device, empty where none was recorded."""
        return self.traces[device] if device < len(self.traces) else Trace()
