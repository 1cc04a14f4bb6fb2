"""Whose pages the events of a trace map and unmap: they do not say of which half of a pool, before torch 2.12 not which pool.

The small half maps one page of 2 MiB at a time, the large one pages of the large segment size. What goes back belongs to
whoever mapped it, and blocks tell by their size in which half they lie. A range that is wholly unmapped goes, and another
may come to lie in its place: so only what was seen since pages were last unmapped tells of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from nbguard.allocator.model.policy import DEFAULT_POOL, SMALL_MAX, SMALL_SEGMENT, PoolId
from nbguard.allocator.snapshot.snapshot import SnapshotSegment, Trace

Owner = tuple[PoolId, bool, int]
"""(pool, whether it is the small half, stream)."""

_GRAIN = 20
"""Of each MiB one fact is kept."""


def page_owners(segments: Iterable[SnapshotSegment], trace: Trace, large_segment: int, reach: int) -> dict[int, Owner]:
    """Return whose pages each event maps or unmaps, by its position in the trace.

    Args:
        segments: at the end of the trace.
        trace: of the same device.
        large_segment: the large segment size, bytes.
        reach: bytes of address space that one expandable segment takes: nothing further away tells of some pages.
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
    """In which half the memory of a stream lies, by address."""

    def __init__(self) -> None:
        self._small: dict[int, bool] = {}
        self._order: list[int] = []

    def note(self, address: int, is_small: bool) -> None:
        """Put down what was seen at an address."""
        grain = address >> _GRAIN
        if grain not in self._small:
            insort(self._order, grain)
        self._small[grain] = is_small

    def take(self, address: int, size: int) -> bool | None:
        """Return the half of pages that go, None where nothing was seen there, and forget it."""
        first, last = bisect_left(self._order, address >> _GRAIN), bisect_left(self._order, address + size >> _GRAIN)
        found = [self._small.pop(grain) for grain in self._order[first:last]]
        del self._order[first:last]
        return found[0] if found else None


class _Pools:
    """Which pool an address belongs to, as the expandable segments at the end tell."""

    def __init__(self, segments: Iterable[SnapshotSegment], reach: int) -> None:
        self._reach = reach
        self._places: dict[tuple[int, bool], list[tuple[int, PoolId]]] = {}
        for segment in sorted(segments, key=lambda segment: segment.address):
            if segment.is_expandable:
                self._places.setdefault((segment.stream, segment.is_small), []).append((segment.address, segment.pool))

    def near(self, stream: int, is_small: bool, address: int) -> PoolId:
        """Return the pool of the nearest segment of a stream and half; everybody's where none is in reach."""
        places = self._places.get((stream, is_small), [])
        index = bisect_left(places, (address,))
        near = [place for place in places[max(index - 1, 0) : index + 1] if abs(place[0] - address) <= self._reach]
        return min(near, key=lambda place: abs(place[0] - address))[1] if near else DEFAULT_POOL
