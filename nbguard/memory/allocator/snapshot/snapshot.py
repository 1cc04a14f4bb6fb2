"""Memory snapshots as frozen plain data, with segments, blocks and the trace of earlier events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeAlias

from nbguard.memory.allocator.model.policy import PoolId
from nbguard.memory.allocator.snapshot.events import Event
from nbguard.memory.allocator.snapshot.stacks import Stacks
from nbguard.plain_data import Within

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
