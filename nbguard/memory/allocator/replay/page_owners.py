"""Owners of the pages that a trace maps and unmaps. An event does not tell the half of a pool, before 2.12 not the pool.

The small half maps one page of 2 MiB at a time, the large one pages of the large segment size. Pages go back to the half
that mapped them, and the size of a block tells the half it lies in. A range that is wholly unmapped is given up, and another
may take its place: so only events since pages were last unmapped tell their half.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from nbguard.memory.allocator.model.policy import DEFAULT_POOL, SMALL_MAX, SMALL_SEGMENT, PoolId
from nbguard.memory.allocator.snapshot.snapshot import SnapshotSegment, Trace

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
