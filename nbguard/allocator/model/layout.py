"""The model's segments and blocks in the form of PyTorch's snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbguard.allocator.model.blocks import FREE, LIVE, UNMAPPED, Block

if TYPE_CHECKING:
    from nbguard.allocator.model.allocator import CachingAllocator

Json = dict[str, Any]

STATES = {FREE: "inactive", LIVE: "active_allocated"}


def all_blocks(allocator: CachingAllocator) -> list[Block]:
    """Return every block that has memory, by address."""
    halves = [half for owner in allocator.pools.values() for half in (owner.small, owner.large)]
    free = [block for half in halves for each in half.by_stream.values() for block in each.blocks]
    return sorted([*allocator.live.values(), *allocator.pending, *free], key=lambda block: block.address)


def segments_of(allocator: CachingAllocator) -> list[Json]:
    """Return segments as `memory_snapshot()` gives them: of an expandable one each stretch that has memory by itself."""
    heads = [block for block in all_blocks(allocator) if block.prev is None or block.prev.state == UNMAPPED]
    return [_segment(head) for head in heads]


def _segment(head: Block) -> Json:
    blocks: list[Block] = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        blocks.append(block)
        block = block.next
    active = [block for block in blocks if block.state != FREE]
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.state == LIVE),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": head.home.stream,
        "segment_type": "small" if head.home.pool.is_small else "large",
        "segment_pool_id": head.home.pool.owner.id,
        "is_expandable": head.range is not None,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": STATES.get(block.state, "active_pending_free"),
            }
            for block in blocks
        ],
    }
