"""How a request is served: which free block is taken, and what happens where none fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbguard.allocator.model import expandable, reclaim
from nbguard.allocator.model.blocks import LIVE, UNMAPPED, Block, FreeSet, Pool
from nbguard.allocator.model.policy import DEFAULT_POOL, segment_size
from nbguard.errors import SimulatedOutOfMemoryError

if TYPE_CHECKING:
    from nbguard.allocator.model.allocator import CachingAllocator


def choose(allocator: CachingAllocator, free: FreeSet, index: int, rounded: int) -> int:
    """Return the index of the block to take, starting from the smallest that is large enough; -1 for none.

    Only one candidate is looked at: where it is refused, the search does not go on to the next.
    """
    settings, blocks = allocator.settings, free.blocks
    if blocks[index].range is not None:
        if settings.expandable:
            while (
                blocks[index].range is not None
                and index + 1 < len(blocks)
                and _reach(blocks[index + 1]) < _reach(blocks[index])
            ):
                index += 1
        else:
            index = next((i for i in range(index + 1, len(blocks)) if blocks[i].range is None), -1)
            if index < 0:
                return -1
    limit = settings.max_split_size
    if limit is not None:
        size = blocks[index].size
        if rounded < limit <= size:
            return -1
        rounding = settings.max_non_split_rounding or settings.large_segment
        if rounded >= limit and size >= rounded + rounding:
            return -1
    return index


def _reach(block: Block) -> int:
    """Return what a block can grow to without new address space: itself and the unmapped stretch behind it."""
    follower = block.next
    return block.size + (follower.size if follower is not None and follower.state == UNMAPPED else 0)


def from_driver(allocator: CachingAllocator, pool: Pool, free: FreeSet, rounded: int) -> Block:
    """Return a block of new memory, giving back cached memory as far as needed. Raises SimulatedOutOfMemoryError."""
    if allocator.collects:
        reclaim.collect_garbage(allocator)
    if (block := _allocate(allocator, pool, free, rounded)) is not None:
        return block
    if _is_rejected(allocator, rounded):
        allocator.num_oom_rejections += 1
        raise SimulatedOutOfMemoryError(rounded, allocator.driver.free())
    if pool.owner.id == DEFAULT_POOL and (block := _from_pools_on_oom(allocator, pool, free.stream, rounded)) is not None:
        return block
    if reclaim.release_available(allocator, free, rounded) and (block := _allocate(allocator, pool, free, rounded)):
        return block
    reclaim.release_cached(allocator, DEFAULT_POOL)
    allocator.num_alloc_retries += 1
    if (block := _allocate(allocator, pool, free, rounded)) is not None:
        return block
    left = allocator.driver.free()
    allocator.events.append(("oom", left or 0, rounded, free.stream))
    allocator.num_ooms += 1
    raise SimulatedOutOfMemoryError(rounded, left)


def _allocate(allocator: CachingAllocator, pool: Pool, free: FreeSet, rounded: int) -> Block | None:
    settings = allocator.settings
    size = segment_size(rounded, settings.large_segment)
    if allocator.cap is not None and allocator.reserved + size > allocator.cap:
        return None
    if settings.expandable:
        block = expandable.allocate(allocator, pool, free, rounded)
        if block is not None:
            pool.owner.segments += 1
        return block
    address = allocator.driver.allocate(size)
    if address is None:
        return None
    allocator.num_device_alloc += 1
    pool.owner.segments += 1
    grow(allocator, size)
    allocator.events.append(("segment_alloc", address, size, free.stream))
    return Block(address, size, free, None, allocator.next_rank(), LIVE)


def grow(allocator: CachingAllocator, size: int) -> None:
    """Count `size` bytes more as reserved."""
    allocator.reserved += size
    allocator.peak_reserved = max(allocator.peak_reserved, allocator.reserved)


def _is_rejected(allocator: CachingAllocator, rounded: int) -> bool:
    """Return whether `throw_on_cudamalloc_oom` refuses the request at once, with nothing given back first."""
    settings = allocator.settings
    if not settings.throw_on_oom or settings.fraction is None or allocator.capacity is None:
        return False
    size = segment_size(rounded, settings.large_segment)
    return allocator.reserved + size > int(settings.fraction * allocator.capacity)


def _from_pools_on_oom(allocator: CachingAllocator, pool: Pool, stream: int, rounded: int) -> Block | None:
    for owner in allocator.pools.values():
        if not (owner.on_oom and owner.is_in_use):
            continue
        half = owner.small if pool.is_small else owner.large
        half.searches += allocator.collects
        free = half.of(stream)
        index = free.first(rounded)
        if index < len(free.keys) and (index := choose(allocator, free, index, rounded)) >= 0:
            del free.keys[index]
            return free.blocks.pop(index)
    return None
