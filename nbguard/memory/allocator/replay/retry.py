"""Detection of retries (whether memory went back within a request or before it), and of the range reserved then."""

from __future__ import annotations

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.policy import PoolId
from nbguard.memory.allocator.model.state import copy
from nbguard.memory.allocator.replay.recorded_driver import TraceDriver
from nbguard.memory.allocator.replay.repair import adopt_range, finds, set_of
from nbguard.memory.allocator.snapshot.events import Event

Events = tuple[Event, ...]
"""The driver's events for a request, then the request's own event."""


def is_retry(model: CachingAllocator, events: Events, released: int, pool: PoolId) -> bool:
    """Return whether memory surely went back within a request, and not before it.

    A request does not search the free blocks again after that. It shows in two cases only: unmapping makes a block that a
    search would have found (before, the block was too large to be split, or free and unmapped blocks together were larger);
    or the first try left an empty range behind, which the second fills.

    Args:
        model: before the request.
        events: of the request.
        released: how many of them give memory back, at the beginning.
        pool: of the request.
    """
    if not model.settings.expandable or finds(model, events[-1], pool) is not None:
        return False
    emptied = copy(model, SimulatedDriver())
    emptied.empty_cache()
    gives = released < len(events) - 1
    if (block := finds(emptied, events[-1], pool)) is not None:
        return gives or block.address != events[-1][1]
    if not gives or _reproduces(emptied, events[released:], pool):
        return False
    return _reproduces(copy(model, SimulatedDriver()), events, pool)


def _reproduces(model: CachingAllocator, events: Events, pool: PoolId) -> bool:
    """Return whether a copy of the model reproduces the events of a request."""
    model.events.clear()
    model.driver = driver = TraceDriver(events, model.events)
    place_range(model, driver, events, pool)
    try:
        model.malloc(events[-1][2], events[-1][3], pool)
    except SimulatedOutOfMemoryError:
        return False
    return tuple(model.events) == events


def place_range(model: CachingAllocator, driver: TraceDriver, events: Events, pool: PoolId) -> None:
    """Place a range of unknown address where a request first maps pages, if nothing else can lie there."""
    driver.fresh = None
    mapped = next((event[1] for event in events if event[0] == "segment_map"), None)
    if mapped is None:
        return
    if events[0][0] == "segment_map":
        adopt_range(set_of(model, events[-1][2], events[-1][3], pool)[0], mapped)
    elif not _is_in_range(model, mapped):
        driver.fresh = mapped


def _is_in_range(model: CachingAllocator, address: int) -> bool:
    """Return whether an address lies in an expandable segment, mapped or not."""
    unmapped = [block for free in model.free_sets() for block in free.unmapped]
    return any(
        block.range is not None and block.range.base <= address < block.range.base + block.range.size
        for block in (*model.blocks(), *unmapped)
    )
