"""Memory snapshots as frozen plain data: segments, blocks and the trace of what happened before."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbguard.allocator.model.policy import PoolId

Event = tuple[str, int, int, int]
"""(action, address, bytes, stream); of an `oom` the second is what the device had left, or -1."""

Frame = tuple[str, int, str]
"""(file, line, function)."""

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot"),
)
"""What a trace can say of the allocator. Other entries, such as annotations, are counted and left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """A piece of a segment. `requested` means nothing in an inactive block; `stack` numbers `Snapshot.stacks`, -1: none."""

    address: int
    size: int
    requested: int
    state: str
    stack: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSegment:
    """Memory from the driver: all of a classic segment, or one stretch of an expandable one that has memory."""

    device: int
    address: int
    total_size: int
    stream: int
    is_small: bool
    is_expandable: bool
    pool: PoolId
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What the allocator of one device did, oldest first.

    `pools` and `stacks` run parallel to `events`; `pools` is None where this torch does not say. `left_out` counts
    entries that are no events of the allocator.
    """

    events: tuple[Event, ...] = ()
    pools: tuple[PoolId, ...] | None = None
    stacks: tuple[int, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What PyTorch's snapshots do not say, from the file beside one that nbguard wrote. None is unknown; sizes in bytes.

    `totals`, `frees` and `fractions` are by device.
    """

    torch_version: str | None = None
    settings: str | None = None
    totals: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    fractions: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot of every device of a process. `settings` is None where the file does not say.

    `divisions` is the table that `roundup_power2_divisions` came to; `hints` are names of fields that only some
    versions of torch write.
    """

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[Trace, ...] = ()
    settings: str | None = None
    divisions: tuple[int, ...] | None = None
    stacks: tuple[tuple[Frame, ...], ...] = ()
    hints: frozenset[str] = frozenset()
    sidecar: Sidecar = field(default_factory=Sidecar)

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices of which it says something."""
        traced = {number for number, trace in enumerate(self.traces) if trace.events}
        return tuple(sorted(traced | {segment.device for segment in self.segments}))

    def trace(self, device: int) -> Trace:
        """Return the trace of a device, empty where none was recorded."""
        return self.traces[device] if device < len(self.traces) else Trace()
