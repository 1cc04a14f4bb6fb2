"""Fragmentation, that is, how much of the allocator's free memory can go back to the device, and how much is stranded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from nbguard.memory.core.facts import Block, PoolId, Segment

EXPANDABLE_PAGE = {"small": 2 * 1024**2, "large": 20 * 1024**2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Bytes of some segments. `allocated + pending + releasable + stranded + kept == reserved`."""

    reserved: int  # all of them
    allocated: int  # live blocks
    pending: int  # freed, but another stream may still use them
    releasable: int  # free, and goes back to the device with `torch.cuda.empty_cache()`
    stranded: int  # free, but shares its segment (or page) with a live block
    kept: int  # free, but of a private pool in use: only its CUDA graph or MemPool can have it
    largest_free: int  # largest stretch of free blocks


@dataclass(frozen=True, slots=True)
class PoolKey:
    """The key of segments that share free blocks: one pool, one stream, one size class (requests up to 1 MiB, or above)."""

    pool: PoolId
    stream: int
    is_small: bool


def by_pool(
    segments: Iterable[Segment], freed: Collection[int] = (), in_use: Collection[PoolId] = ()
) -> dict[PoolKey, Fragmentation]:
    """Return `fragmentation` of each pool by itself, everybody's first; the pools add up to all segments."""
    groups: dict[PoolKey, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(PoolKey(segment.pool, segment.stream, segment.is_small), []).append(segment)
    keys = sorted(groups, key=lambda key: (key.pool, key.stream, not key.is_small))
    return {key: fragmentation(groups[key], freed, in_use) for key in keys}


def fragmentation(segments: Iterable[Segment], freed: Collection[int] = (), in_use: Collection[PoolId] = ()) -> Fragmentation:
    """Sum up segments, as if the blocks at the addresses `freed` were free already.

    A whole free segment can be returned, of an expandable segment every whole page that lies in free space. Private pools
    that are `in_use` give nothing back. The rules are PyTorch's `empty_cache`.
    """
    reserved = allocated = pending = releasable = kept = largest = 0
    for segment in segments:
        reserved += segment.total_size
        for run in free_runs(segment, freed):
            largest = max(largest, run[1])
            if segment.pool in in_use:
                kept += run[1]
            else:
                releasable += returnable_part(segment, *run)[1]
        for block in segment.blocks:
            if not is_free(block, freed):
                allocated += block.size if block.state == "active_allocated" else 0
                pending += block.size if block.state != "active_allocated" else 0
    stranded = reserved - allocated - pending - releasable - kept
    return Fragmentation(
        reserved=reserved,
        allocated=allocated,
        pending=pending,
        releasable=releasable,
        stranded=stranded,
        kept=kept,
        largest_free=largest,
    )


def left_in_segments(segments: Iterable[Segment], freed: Collection[int], in_use: Collection[PoolId] = ()) -> int:
    """Return the bytes of the blocks `freed` that `empty_cache` does not give back: their segments, or pages, stay pinned.

    `in_use` as in `fragmentation`.
    """
    remaining = 0
    for segment in segments:
        runs = free_runs(segment, freed)
        run_end = back_start = back_end = 0
        for block in segment.blocks:
            if block.state == "inactive" or block.address not in freed:
                continue
            while block.address >= run_end:
                start, size = next(runs)
                run_end = start + size
                back_start, back = (0, 0) if segment.pool in in_use else returnable_part(segment, start, size)
                back_end = back_start + back
            gone = min(block.address + block.size, back_end) - max(block.address, back_start)
            remaining += block.size - max(0, gone)
    return remaining


def stranded_pages(segments: Iterable[Segment]) -> int:
    """Return the bytes of whole pages in the free blocks between live ones, wherever page borders fall.

    An expandable segment with its blocks in the same places would give back at least so many of the stranded bytes.
    """
    nbytes = 0
    for segment in segments:
        page = EXPANDABLE_PAGE["small" if segment.is_small else "large"]
        runs = (size for _, size in free_runs(segment) if size != segment.total_size)
        nbytes += sum(max(0, (size - page + 1) // page) * page for size in runs)
    return nbytes


def unit_pages(segment: Segment) -> int:
    """Return the unit in bytes that a segment goes back to the device by: all of it, or one page of an expandable one."""
    return EXPANDABLE_PAGE["small" if segment.is_small else "large"] if segment.is_expandable else segment.total_size


def is_free(block: Block, freed: Collection[int]) -> bool:
    """Return whether a block is free, or would be with those at the addresses `freed`."""
    return block.state == "inactive" or block.address in freed


def free_runs(segment: Segment, freed: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield (address, size) of each stretch of free blocks; neighbours that are free merge."""
    start = size = 0
    for block in segment.blocks:
        if is_free(block, freed):
            start = start if size else block.address
            size += block.size
        elif size:
            yield start, size
            size = 0
    if size:
        yield start, size


def returnable_part(segment: Segment, start: int, size: int) -> tuple[int, int]:
    """Return (address, size) of the part of a stretch of free blocks that `empty_cache` gives back; size 0 for none."""
    page = unit_pages(segment)
    first, last = -(-(start - segment.address) // page), (start + size - segment.address) // page
    return segment.address + first * page, max(0, last - first) * page
