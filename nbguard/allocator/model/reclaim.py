"""What goes back to the driver, or to the free blocks, and when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nbguard.allocator.model import expandable
from nbguard.allocator.model.blocks import PENDING, Block, FreeSet, Pool
from nbguard.allocator.model.policy import DEFAULT_POOL, PoolId

if TYPE_CHECKING:
    from nbguard.allocator.model.allocator import CachingAllocator


def defer(allocator: CachingAllocator, block: Block) -> None:
    """Let a freed block wait for the streams that used it: one event on each."""
    streams, block.streams = block.streams or set(), None
    block.state = PENDING
    block.waits = len(streams)
    allocator.pending.append(block)
    allocator.pending_bytes += block.size
    allocator.ticket += 1
    for stream in sorted(streams):
        allocator.waiting.setdefault(stream, deque()).append((allocator.ticket, block))


def process_events(allocator: CachingAllocator, *, synchronize: bool = False) -> None:
    """Free the blocks whose events are done; of each stream in order, up to the first that is not.

    PyTorch goes through the streams in the order of a hash table, which a stream's handle does not tell; here the one
    that has waited longest comes first. A replay takes the order from the trace.

    Args:
        allocator: the model.
        synchronize: wait for all of them.
    """
    done = allocator.ticket if synchronize or allocator.events_are_instant else allocator.done_ticket
    for stream, queue in list(allocator.waiting.items()):
        while queue and queue[0][0] <= done:
            _, block = queue.popleft()
            block.waits -= 1
            if not block.waits:
                complete(allocator, block)
        if not queue:
            del allocator.waiting[stream]


def _synchronize(allocator: CachingAllocator, pool: PoolId) -> None:
    """Wait for the streams that used blocks of one private pool, if it can be given back at all."""
    owner = allocator.pools.get(pool)
    if owner is None or owner.is_in_use:
        return
    blocks = [block for block in allocator.pending if block.home.pool.owner is owner]
    for stream, queue in list(allocator.waiting.items()):
        left = deque(entry for entry in queue if entry[1].home.pool.owner is not owner)
        if left:
            allocator.waiting[stream] = left
        else:
            del allocator.waiting[stream]
    for block in blocks:
        complete(allocator, block)


def complete(allocator: CachingAllocator, block: Block) -> None:
    """Make a block that waited free."""
    allocator.pending.remove(block)
    block.waits = 0
    allocator.pending_bytes -= block.size
    allocator.requested -= block.requested
    allocator.events.append(("free_completed", block.address, block.requested, block.home.stream))
    allocator.put_back(block)


def release_cached(allocator: CachingAllocator, pool: PoolId) -> None:
    """Give back everything that can go: whole free segments, and whole free pages of expandable ones."""
    if pool == DEFAULT_POOL:
        process_events(allocator, synchronize=True)
        allocator.num_sync_all_streams += 1
        default = allocator.pools[DEFAULT_POOL]
        _release(allocator, default.large)
        _release(allocator, default.small)
    else:
        _synchronize(allocator, pool)
    for owner in list(allocator.pools.values()):
        if owner.is_in_use or (pool not in (DEFAULT_POOL, owner.id)):
            continue
        _release(allocator, owner.small)
        _release(allocator, owner.large)
        if not owner.segments:
            del allocator.pools[owner.id]


def would_release(allocator: CachingAllocator, pool: PoolId = DEFAULT_POOL) -> list[tuple[str, int, int, int]]:
    """Return the events that `release_cached` would cause, without doing anything; blocks that wait are left out."""
    default = allocator.pools[DEFAULT_POOL]
    halves = [default.large, default.small] if pool == DEFAULT_POOL else []
    for owner in allocator.pools.values():
        if not owner.is_in_use and pool in (DEFAULT_POOL, owner.id):
            halves += [owner.small, owner.large]
    events: list[tuple[str, int, int, int]] = []
    for half in halves:
        sets = list(half.in_order())
        events += [
            ("segment_free", block.address, block.size, free.stream)
            for free in sets
            for block in free.blocks
            if block.range is None and not block.is_split
        ]
        for free in sets:
            pages = [expandable.whole_pages(block) for block in free.blocks if block.range is not None]
            events += [("segment_unmap", first, last - first, free.stream) for first, last in pages if last > first]
    return events


def _release(allocator: CachingAllocator, pool: Pool) -> None:
    stretches: list[Block] = []
    for free in pool.in_order():
        whole = [block for block in free.blocks if block.range is None and not block.is_split]
        stretches += [block for block in free.blocks if block.range is not None]
        for block in whole:
            release_segment(allocator, block)
    for block in stretches:
        expandable.unmap(allocator, block)


def release_segment(allocator: CachingAllocator, block: Block) -> None:
    """Give a segment that is one free block back to the driver."""
    block.home.remove(block)
    block.home.pool.owner.segments -= 1
    allocator.driver.release(block.address, block.size)
    allocator.num_device_free += 1
    allocator.reserved -= block.size
    allocator.events.append(("segment_free", block.address, block.size, block.home.stream))


def release_available(allocator: CachingAllocator, free: FreeSet, rounded: int) -> bool:
    """Give back just enough blocks that are too large to be split; return whether it was enough for the request."""
    limit = allocator.settings.max_split_size
    if limit is None:
        return False
    wanted = max(rounded, limit)
    index = free.first(wanted)
    if index < len(free.blocks) and free.blocks[index].range is None:
        release_segment(allocator, free.blocks[index])
        return True
    released = 0
    for block in reversed(free.blocks[:index]):
        if released >= wanted or block.size < limit:
            break
        if block.range is None:
            released += block.size
            release_segment(allocator, block)
    return released >= wanted


def collect_garbage(allocator: CachingAllocator) -> None:
    """Give back segments that nobody took for longer than the average, once more than the threshold is reserved.

    Goes on in rounds until as much is back as lies above the threshold. Only everybody's large pool counts.
    """
    assert allocator.cap is not None
    limit = int(allocator.settings.gc_threshold * allocator.cap)
    if allocator.reserved <= limit:
        return
    target = allocator.reserved - limit
    pool = allocator.pools[DEFAULT_POOL].large
    unsplit = [block for free in pool.in_order() for block in free.blocks if not block.is_split]
    total, count = sum(pool.searches - block.born for block in unsplit), len(unsplit)
    candidates = [block for block in unsplit if block.range is None]
    reclaimed = 0
    while reclaimed < target and count:
        average = total / count
        old = [block for block in candidates if pool.searches - block.born >= average]
        # The average is of the round's start, while what goes no longer counts for the next round.
        for block in old:
            reclaimed += block.size
            total -= pool.searches - block.born
            count -= 1
            release_segment(allocator, block)
        if not old:
            return
        candidates = [block for block in candidates if pool.searches - block.born < average]
