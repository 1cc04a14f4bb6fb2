"""The search for the cheapest moves, against the model of the allocator itself in random states."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.state import copy
from nbguard.memory.room.search import Question, cheapest_moves
from tests.allocator.test_largest import room_of, states
from tests.thorough import examples

MIB = 2**20
_CONFS = (
    "",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.5",
    "large_segment_size_mb:32",
)


def question(model: CachingAllocator, nbytes: int, movable: Collection[int] | None = None) -> Question:
    room = room_of(model)
    return Question(device=room.device, nbytes=nbytes, movable=model.live if movable is None else movable, in_use=room.in_use)


def moved(model: CachingAllocator, addresses: Iterable[int], nbytes: int) -> CachingAllocator | None:
    """Return a copy of the model after a move and the request; None where it runs out of memory."""
    tried, addresses = copy(model), tuple(addresses)
    tried.cap = model.cap
    tried.empty_cache()
    left = [(tried.live[at].requested, tried.live[at].home.stream) for at in addresses]
    for at in addresses:
        tried.free(at)
    tried.empty_cache()
    try:
        tried.malloc(nbytes)
        for requested, stream in left:
            tried.malloc(requested, stream)
    except SimulatedOutOfMemoryError:
        return None
    return tried


@settings(max_examples=examples(60), deadline=None)
@given(states(_CONFS), st.integers(1, 400), st.integers(0, 10**6))
def test_an_answer_is_what_the_allocator_gives(model: CachingAllocator, size: int, seed: int) -> None:
    movable = [at for at in model.live if random.Random(seed + at).random() < 0.8]
    asked = question(model, size * MIB, movable)

    moves = cheapest_moves(asked)

    if moves is None:
        assert moved(model, asked.in_return_order(asked.blocks), size * MIB) is None
        assert moved(model, (), size * MIB) is None
        return
    assert set(moves) <= set(movable)
    assert all(model.live[at].home.pool.owner.id == (0, 0) for at in moves), "a private pool stays as it is"
    after = moved(model, moves, size * MIB)
    assert after is not None
    assert after.requested - model.requested == size * MIB - sum(block.requested for block in model.pending)


def comb(live: Iterable[int], segment: int = 64, capacity: int = 624) -> CachingAllocator:
    """Return a model of segments, in MiB, in each of which one block lives that is as large as given."""
    model = CachingAllocator(capacity=capacity * MIB, driver=SimulatedDriver(capacity * MIB))
    whole = [model.malloc(segment * MIB) for _ in live]
    for at in whole:
        model.free(at)
    for size in live:
        model.malloc(size * MIB)
        model.malloc((segment - size) * MIB)
    for at in [at for at, block in model.live.items() if block.prev is not None]:
        model.free(at)
    return model


def brute_force(model: CachingAllocator, nbytes: int) -> int | None:
    """Return the fewest bytes whose leaving lets the request in, of all sets of live blocks."""
    sets = chain.from_iterable(combinations(model.live, count) for count in range(len(model.live) + 1))
    asked = question(model, nbytes)
    costs = [sum(model.live[at].size for at in each) for each in sets if moved(model, asked.in_return_order(each), nbytes)]
    return min(costs, default=None)


@pytest.mark.parametrize("size", [160, 256])
@pytest.mark.parametrize("live", [[16] * 7, [4, 60, 8, 56, 12, 52, 16], [16, 4, 40, 33, 50, 16, 50]])
def test_of_few_segments_the_cheapest_set_is_found(live: list[int], size: int) -> None:
    model = comb(live, capacity=478)

    moves = cheapest_moves(question(model, size * MIB))

    assert (None if moves is None else sum(model.live[at].size for at in moves)) == brute_force(model, size * MIB)


def test_a_hole_between_neighbours_is_cheaper_than_a_segment() -> None:
    model = CachingAllocator(capacity=160 * MIB, driver=SimulatedDriver(160 * MIB))
    for at in [model.malloc(80 * MIB), model.malloc(80 * MIB)]:
        model.free(at)
    low, small, high, other = (model.malloc(size * MIB) for size in (38, 2, 40, 30))
    model.free(low)
    model.free(high)

    moves = cheapest_moves(question(model, 60 * MIB))

    assert moves == (small,), "its neighbours are free, and the segment of `other` is not needed"
    assert other in model.live


def test_what_may_not_move_keeps_its_segment() -> None:
    model = comb([16] * 9)
    pinned = list(model.live)[:6]

    moves = cheapest_moves(question(model, 256 * MIB, set(model.live) - set(pinned)))

    assert moves is None, "three segments are too few"
