"""Expandable segments: one range of address space per pool and stream, in which memory comes and goes page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbguard.allocator.model.blocks import COUNTER_SHIFT, FREE, LIVE, UNMAPPED, Block, FreeSet, Pool, Range
from nbguard.allocator.model.policy import SMALL_SEGMENT, range_size

if TYPE_CHECKING:
    from nbguard.allocator.model.allocator import CachingAllocator


def allocate(allocator: CachingAllocator, pool: Pool, free: FreeSet, rounded: int) -> Block | None:
    """Return a block of at least `rounded` bytes at the front of free or newly mapped space; None if mapping fails.

    Pages that were mapped before another one failed stay mapped, and free.
    """
    block = _candidate(allocator, pool, free, rounded)
    if block.state == UNMAPPED and not map_pages(allocator, block, min(block.size, rounded)):
        return None
    while block.size < rounded:
        following = block.next
        if following is None or following.state != UNMAPPED:
            return None  # a request larger than the address space of the device
        if not map_pages(allocator, following, min(rounded - block.size, following.size)):
            return None
        block = following
    free.remove(block)
    block.state = LIVE
    return block


def _candidate(allocator: CachingAllocator, pool: Pool, free: FreeSet, rounded: int) -> Block:
    """Return the first block, by address, from which free and unmapped blocks span the request; else a new range."""
    for unmapped in free.unmapped:
        before = unmapped.prev
        start = before if before is not None and before.state == FREE else unmapped
        span = 0
        block: Block | None = start
        while span < rounded and block is not None and block.state in (FREE, UNMAPPED):
            span += block.size
            block = block.next
        if span >= rounded:
            return start
    page = SMALL_SEGMENT if pool.is_small else allocator.settings.large_segment
    size = range_size(allocator.capacity, page)
    rank = allocator.next_rank()
    space = Range(allocator.driver.reserve(size), size, page, rank >> COUNTER_SHIFT)
    whole = Block(space.base, size, free, space, rank, UNMAPPED)
    free.add_unmapped(whole)
    return whole


def map_pages(allocator: CachingAllocator, block: Block, size: int) -> bool:
    """Put memory behind the first `size` bytes of an unmapped block, in whole pages, and merge with free neighbours."""
    space, free = block.range, block.home
    assert space is not None
    size = -(-size // space.page) * space.page
    if not allocator.driver.map(block.address, size):
        return False
    address = block.address
    free.remove_unmapped(block)
    if size < block.size:
        rest = Block(address + size, block.size - size, free, space, new_rank(allocator, block), UNMAPPED)
        rest.put_after(block)
        free.add_unmapped(rest)
        block.size = size
    for neighbour in (block.prev, block.next):
        if neighbour is not None and neighbour.state == FREE:
            free.remove(neighbour)
            block.swallow(neighbour)
    free.add(block)
    allocator.num_device_alloc += 1
    allocator.reserved += size
    allocator.peak_reserved = max(allocator.peak_reserved, allocator.reserved)
    allocator.events.append(("segment_map", address, size, free.stream))
    return True


def whole_pages(block: Block) -> tuple[int, int]:
    """Return (start, end) of the whole pages inside a block; there are none where the end is not above the start."""
    space = block.range
    assert space is not None
    first = -(-(block.address - space.base) // space.page) * space.page + space.base
    last = (block.address + block.size - space.base) // space.page * space.page + space.base
    return first, last


def unmap(allocator: CachingAllocator, block: Block) -> None:
    """Give back the whole pages that lie inside a free block; what is left before and behind them stays free."""
    space, free = block.range, block.home
    assert space is not None
    first, last = whole_pages(block)
    if last <= first:
        return
    allocator.driver.unmap(first, last - first)
    free.remove(block)
    if first > block.address:
        head = Block(block.address, first - block.address, free, space, new_rank(allocator, block), FREE)
        head.put_before(block)
        free.add(head)
    if block.address + block.size > last:
        tail = Block(last, block.address + block.size - last, free, space, new_rank(allocator, block), FREE)
        tail.put_after(block)
        free.add(tail)
    block.address, block.size = first, last - first
    for neighbour in (block.prev, block.next):
        if neighbour is not None and neighbour.state == UNMAPPED:
            free.remove_unmapped(neighbour)
            block.swallow(neighbour)
    free.add_unmapped(block)
    free.pool.owner.segments -= 1
    allocator.num_device_free += 1
    allocator.reserved -= last - first
    allocator.events.append(("segment_unmap", first, last - first, free.stream))
    if not block.is_split:
        free.remove_unmapped(block)
        allocator.driver.unreserve(space.base, space.size)


def new_rank(allocator: CachingAllocator, block: Block) -> int:
    """Return the rank of a piece of `block`: a new one where every block object counts, else that of its range."""
    return allocator.next_rank() if allocator.tie == "block" else block.rank
