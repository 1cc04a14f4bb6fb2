"""Segments and blocks of the model in the form of PyTorch's snapshots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbguard.memory.allocator.model.blocks import FREE, LIVE, UNMAPPED, ModelBlock

Json = dict[str, Any]

_STATES = {FREE: "inactive", LIVE: "active_allocated"}


def segments_of(blocks: Iterable[ModelBlock]) -> list[Json]:
    """Return the segments that have `blocks`, by address, as `memory_snapshot()` gives them.

    Of an expandable segment each stretch that has memory is a segment of its own.
    """
    return [_segment(block) for block in blocks if block.prev is None or block.prev.state == UNMAPPED]


def _segment(head: ModelBlock) -> Json:
    blocks: list[ModelBlock] = []
    block: ModelBlock | None = head
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
                "state": _STATES.get(block.state, "active_pending_free"),
            }
            for block in blocks
        ],
    }
