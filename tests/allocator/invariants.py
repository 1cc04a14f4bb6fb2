"""What holds of a model at every moment, whatever was asked of it."""

from __future__ import annotations

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import FREE, LIVE, PENDING, UNMAPPED, ModelBlock
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.state import _heads


def check(model: CachingAllocator) -> None:
    """Raise AssertionError if blocks overlap, bytes are lost, neighbours are unmerged or counters are not their sums."""
    chains = [_chain(head) for head in _heads(model)]
    blocks = [block for chain in chains for block in chain]
    _check_places(chains)
    _check_sets(model, blocks)
    total = {state: sum(block.size for block in blocks if block.state == state) for state in (FREE, LIVE, PENDING)}
    assert sum(total.values()) == model.reserved
    assert total[LIVE] == model.allocated
    assert total[LIVE] + total[PENDING] == model.active
    assert sum(block.requested for block in blocks if block.state in (LIVE, PENDING)) == model.requested
    assert len(model.live) == model.num_allocs - model.num_frees
    assert model.peak_reserved >= model.reserved
    assert model.peak_allocated >= model.allocated
    if isinstance(model.driver, SimulatedDriver):
        assert model.driver.used == model.reserved
    if model.cap is not None:
        assert model.reserved <= model.cap or model.settings.expandable  # whole pages may lie above it
    segments = model.segments()
    assert sum(segment["total_size"] for segment in segments) == model.reserved
    assert sum(segment["allocated_size"] for segment in segments) == model.allocated
    assert sum(segment["active_size"] for segment in segments) == model.active


def _chain(head: ModelBlock) -> list[ModelBlock]:
    chain, block = [], head
    while block is not None:
        chain.append(block)
        block = block.next
    return chain


def _check_places(chains: list[list[ModelBlock]]) -> None:
    end = 0
    for chain in chains:
        assert chain[0].address >= end, "segments overlap"
        end = chain[0].address
        for before, block in zip([None, *chain], chain, strict=False):
            assert block.prev is before
            assert block.address == end
            assert block.size > 0
            assert block.size % 512 == 0
            if before is not None and before.state == block.state:
                assert block.state in (LIVE, PENDING), "free neighbours are not merged"
            end += block.size
        if chain[0].range is None:
            assert all(block.state != UNMAPPED for block in chain)
        else:
            assert chain[0].address == chain[0].range.base
            assert end == chain[0].range.base + chain[0].range.size


def _check_sets(model: CachingAllocator, blocks: list[ModelBlock]) -> None:
    halves = [half for owner in model.pools.values() for half in (owner.small, owner.large)]
    sets = [free for half in halves for free in half.by_stream.values()]
    assert all(free.keys == sorted(free.keys) for free in sets)
    assert all(block.home is free for free in sets for block in (*free.blocks, *free.unmapped))
    for state, found in (
        (FREE, [block for free in sets for block in free.blocks]),
        (UNMAPPED, [block for free in sets for block in free.unmapped]),
        (LIVE, list(model.live.values())),
        (PENDING, model.pending),
    ):
        assert sorted(map(id, found)) == sorted(id(block) for block in blocks if block.state == state)
    assert all(address == block.address for address, block in model.live.items())
