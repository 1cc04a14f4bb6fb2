"""Rollback of a snapshot through its trace, to the segments and blocks at its start, with the owners of mapped pages."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, LARGE_SEGMENT, SMALL_MAX, SMALL_SEGMENT, PoolId
from nbguard.memory.allocator.snapshot.snapshot import Event, SnapshotSegment, Trace

# --- Owners of the pages that a trace maps and unmaps. An event does not tell the half of a pool, before 2.12 not the pool.
#
# The small half maps one page of 2 MiB at a time, the large one pages of the large segment size. Pages go back to the half
# that mapped them, and the size of a block tells the half it lies in. A range that is wholly unmapped is given up, and
# another may take its place: so only events since pages were last unmapped tell their half.


Owner = tuple[PoolId, bool, int]
"""(pool, whether it is the small half, stream)."""

_GRAIN = 20
"""Bits of an address below 1 MiB: one half is kept for each MiB."""


def page_owners(segments: Iterable[SnapshotSegment], trace: Trace, large_segment: int, reach: int) -> dict[int, Owner]:
    """Return the owner of the pages that each event maps or unmaps, by the event's position in the trace.

    Args:
        segments: at the end of the trace.
        trace: of the same device.
        large_segment: the large segment size, bytes.
        reach: bytes of address space of one expandable segment: no page further away has the same owner for certain.
    """
    actions = {event[0] for event in trace.events}
    if actions.isdisjoint(("segment_map", "segment_unmap")):
        return {}
    telling = {"segment_map", "alloc", "free_requested"} if "segment_unmap" in actions else set()
    pools = _Pools(segments, reach)
    halves: dict[int, _Halves] = {}
    owners: dict[int, Owner] = {}
    for index, (action, address, size, stream) in enumerate(trace.events):
        is_small = size <= (SMALL_MAX if action in ("alloc", "free_requested") else SMALL_SEGMENT)
        if action in telling:
            halves.setdefault(stream, _Halves()).note(address, is_small)
        if action == "segment_unmap":
            known = halves.setdefault(stream, _Halves()).take(address, size)
            is_small = size % large_segment != 0 if known is None else known
        if action in ("segment_map", "segment_unmap"):
            pool = trace.pools[index] if trace.pools is not None else pools.near(stream, is_small, address)
            owners[index] = pool, is_small, stream
    return owners


class _Halves:
    """The halves of the pool that hold a stream's memory, by address."""

    def __init__(self) -> None:
        self._small: dict[int, bool] = {}
        self._order: list[int] = []

    def note(self, address: int, is_small: bool) -> None:
        """Note the half of an address."""
        grain = address >> _GRAIN
        if grain not in self._small:
            insort(self._order, grain)
        self._small[grain] = is_small

    def take(self, address: int, size: int) -> bool | None:
        """Return the half of pages that are unmapped, None where it is not known, and forget it."""
        first, last = bisect_left(self._order, address >> _GRAIN), bisect_left(self._order, address + size >> _GRAIN)
        halves = [self._small.pop(grain) for grain in self._order[first:last]]
        del self._order[first:last]
        return halves[0] if halves else None


class _Pools:
    """The pools of addresses, from the expandable segments at the end of the trace."""

    def __init__(self, segments: Iterable[SnapshotSegment], reach: int) -> None:
        self._reach = reach
        self._places: dict[tuple[int, bool], list[tuple[int, PoolId]]] = {}
        for segment in sorted(segments, key=lambda segment: segment.address):
            if segment.is_expandable:
                self._places.setdefault((segment.stream, segment.is_small), []).append((segment.address, segment.pool))

    def near(self, stream: int, is_small: bool, address: int) -> PoolId:
        """Return the pool of the nearest segment of a stream and half; the default pool where none is in reach."""
        places = self._places.get((stream, is_small), [])
        index = bisect_left(places, (address,))
        near = [place for place in places[max(index - 1, 0) : index + 1] if abs(place[0] - address) <= self._reach]
        return min(near, key=lambda place: abs(place[0] - address))[1] if near else DEFAULT_POOL


class Intervals:
    """A set of addresses, kept as stretches [start, end) in order."""

    def __init__(self) -> None:
        self._edges: list[int] = []  # start, end, start, end, …

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._edges[::2], self._edges[1::2], strict=True)

    def __len__(self) -> int:
        return len(self._edges) // 2

    def copy(self) -> Intervals:
        """Return the same stretches, to be changed independently."""
        other = Intervals()
        other._edges = self._edges.copy()
        return other

    def add(self, start: int, end: int) -> bool:
        """Add a stretch, joined with the stretches it touches; return whether all of it was absent."""
        first, last = bisect_right(self._edges, start), bisect_left(self._edges, end)
        is_absent = first == last and first % 2 == 0
        if is_absent:
            self._edges[first:last] = [start, end]
            self._join(first + 1)
            self._join(first - 1)
        return is_absent

    def _join(self, index: int) -> None:
        if 0 < index < len(self._edges) - 1 and self._edges[index] == self._edges[index + 1]:
            del self._edges[index : index + 2]

    def remove(self, start: int, end: int) -> bool:
        """Remove a stretch; return whether all of it was there."""
        first, last = bisect_right(self._edges, start), bisect_left(self._edges, end)
        was_there = first == last and first % 2 == 1
        if was_there:
            self._edges[first:last] = [start, end]
            self._drop_empty(first + 1)
            self._drop_empty(first - 1)
        return was_there

    def _drop_empty(self, index: int) -> None:
        if self._edges[index] == self._edges[index + 1]:
            del self._edges[index : index + 2]


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block in use when the trace began."""

    address: int
    requested: int  # bytes of the request
    size: int | None = None  # bytes; None where only the request is known, as the block was freed before the snapshot
    is_pending: bool = False  # freed already, and waiting for another stream


@dataclass(slots=True, kw_only=True)
class InitialState:
    """The allocator's state at the start of a trace."""

    segments: dict[int, tuple[int, Owner]] = field(default_factory=dict)  # classic ones: (bytes, owner) by address
    mapped: dict[Owner, Intervals] = field(default_factory=dict)  # stretches of expandable segments that have memory
    ever_mapped: dict[Owner, set[int]] = field(default_factory=dict)  # addresses at which pages were mapped, then or later
    blocks: dict[int, LiveBlock] = field(default_factory=dict)  # by address
    pools: dict[int, PoolId] = field(default_factory=dict)  # private pool of a segment_alloc event, by position, if known

    @property
    def reserved(self) -> int:
        """Bytes from the driver at the start."""
        stretches = sum(end - start for intervals in self.mapped.values() for start, end in intervals)
        return sum(size for size, _ in self.segments.values()) + stretches


def roll_back(
    segments: Sequence[SnapshotSegment], trace: Trace, large_segment: int = LARGE_SEGMENT, reach: int = 2**38
) -> InitialState:
    """Return the state before the first event of a trace that ends with `segments`. Both are of one device.

    Args:
        segments: at the end of the trace.
        trace: the events that led there.
        large_segment: the large segment size, bytes.
        reach: bytes of address space that one expandable segment takes.

    Raises:
        SnapshotError: trace and segments contradict each other.
    """
    start = InitialState()
    owners = page_owners(segments, trace, large_segment, reach)
    for segment in segments:
        owner = (segment.pool, segment.is_small, segment.stream)
        if segment.is_expandable:
            start.mapped.setdefault(owner, Intervals()).add(segment.address, segment.address + segment.total_size)
            start.ever_mapped.setdefault(owner, set()).add(segment.address)
        else:
            start.segments[segment.address] = (segment.total_size, owner)
        for block in segment.blocks:
            if block.state != "inactive":
                is_pending = block.state != "active_allocated"
                start.blocks[block.address] = LiveBlock(block.address, block.requested, block.size, is_pending)
    _undo_all(start, trace, owners)
    return start


def _undo_all(start: InitialState, trace: Trace, owners: dict[int, Owner]) -> None:
    """Undo the trace from its end. Meanwhile a block is a tuple (requested, size, whether it is pending): that is quicker."""
    blocks = {block.address: (block.requested, block.size, block.is_pending) for block in start.blocks.values()}
    events, pools = trace.events, trace.pools
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        action, address, size, _ = event
        if action == "alloc":
            if blocks.pop(address, None) is None:
                raise _contradiction(index, event, "nothing was allocated there later")
        elif action == "free_completed":
            if address in blocks:
                raise _contradiction(index, event, "it was in use afterwards")
            blocks[address] = (size, None, True)
        elif action == "free_requested":
            requested, actual, is_pending = blocks.get(address, (0, 0, False))
            if not is_pending:
                raise _contradiction(index, event, "it never became free")
            blocks[address] = (requested, actual, False)
        else:
            _undo_driver(start, event, index, None if pools is None else pools[index], owners.get(index))
    start.blocks = {address: LiveBlock(address, *block) for address, block in blocks.items()}


def _undo_driver(start: InitialState, event: Event, index: int, pool: PoolId | None, owner: Owner | None) -> None:
    action, address, size, stream = event
    match action:
        case "segment_alloc":
            segment = start.segments.pop(address, None)
            if segment is None or segment[0] != size:
                raise _contradiction(index, event, "there was no such segment afterwards")
            if segment[1][0] != DEFAULT_POOL:
                start.pools[index] = segment[1][0]
        case "segment_free":
            if address in start.segments:
                raise _contradiction(index, event, "the segment was there afterwards")
            start.segments[address] = (size, (pool or DEFAULT_POOL, size <= SMALL_SEGMENT, stream))
        case "segment_map" | "segment_unmap":
            assert owner is not None
            stretches, addresses = start.mapped.setdefault(owner, Intervals()), start.ever_mapped.setdefault(owner, set())
            addresses.add(address)
            done = stretches.remove if action == "segment_map" else stretches.add
            if not done(address, address + size):
                raise _contradiction(index, event, "those pages were not so afterwards")
            if not stretches:
                addresses.clear()  # the range is new here; one before it lay elsewhere


def _contradiction(index: int, event: Event, why: str) -> SnapshotError:
    return SnapshotError(f"trace and segments contradict each other: event {index} is {event[0]} at {event[1]}, and {why}.")
