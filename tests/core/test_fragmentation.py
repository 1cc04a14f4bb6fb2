from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nbguard.memory.core.facts import Segment
from nbguard.memory.core.fragmentation import by_pool, fragmentation, free_runs, left_in_segments, returnable_part
from nbguard.testing import make_segment

MiB = 1024**2
_PARTS = ("allocated", "pending", "releasable", "stranded", "kept")
_STATES = st.sampled_from(["active_allocated", "active_pending_free", "inactive"])


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        blocks = draw(st.lists(st.tuples(st.integers(1, 64).map(lambda n: n * 512 * 1024), _STATES), min_size=1, max_size=6))
        expandable, small = draw(st.tuples(st.booleans(), st.booleans()))
        pool, stream = draw(st.sampled_from([(0, 0), (1, 0), (0, 2)])), draw(st.integers(0, 2))
        found.append(make_segment(*blocks, address=number << 40, expandable=expandable, small=small, pool=pool, stream=stream))
    return found


@given(segments(), st.sets(st.sampled_from([(1, 0), (0, 2)])))
def test_the_parts_re_add_to_what_is_reserved(found: list[Segment], in_use: set[tuple[int, int]]) -> None:
    result = fragmentation(found, in_use=in_use)
    parts = [getattr(result, name) for name in _PARTS]

    assert sum(parts) == result.reserved
    assert min(parts) >= 0
    pools = by_pool(found, in_use=in_use).values()
    assert [sum(getattr(space, name) for space in pools) for name in _PARTS] == parts


@given(segments(), st.randoms(use_true_random=False))
def test_what_is_freed_goes_back_or_stays_in_its_segment(found: list[Segment], random: Any) -> None:
    live = [block for segment in found for block in segment.blocks if block.state != "inactive"]
    freed = {block.address for block in live if random.random() < 0.5}
    in_use = {(0, 2)}
    goes_back: set[int] = set()
    for segment in found:
        for run in free_runs(segment, freed) if segment.pool not in in_use else ():
            start, size = returnable_part(segment, *run)
            goes_back.update(range(start, start + size, 512 * 1024))
    units = [at for b in live if b.address in freed for at in range(b.address, b.address + b.size, 512 * 1024)]

    stays = left_in_segments(found, freed, in_use)

    assert stays == sum(at not in goes_back for at in units) * 512 * 1024
    assert left_in_segments(found, set()) == 0
    assert fragmentation(found, freed, in_use).releasable >= len(units) * 512 * 1024 - stays


def test_one_live_block_strands_the_rest_of_its_segment() -> None:
    found = fragmentation([make_segment((1 * MiB, "active_allocated"), (19 * MiB, "inactive"))])

    assert (found.releasable, found.stranded, found.largest_free) == (0, 19 * MiB, 19 * MiB)


def test_a_free_segment_is_releasable() -> None:
    assert fragmentation([make_segment((20 * MiB, "inactive"))]).releasable == 20 * MiB


def test_a_private_pool_in_use_keeps_what_is_free() -> None:
    segment = make_segment((8 * MiB, "active_allocated"), (12 * MiB, "inactive"), pool=(1, 0))

    kept, let_go = fragmentation([segment], in_use={(1, 0)}), fragmentation([segment])

    assert (kept.kept, kept.releasable, kept.stranded) == (12 * MiB, 0, 0)
    assert (let_go.kept, let_go.releasable, let_go.stranded) == (0, 0, 12 * MiB)
    assert fragmentation([segment], {0}).releasable == 20 * MiB


def test_pools_are_told_apart_and_re_add() -> None:
    segments = [
        make_segment((20 * MiB, "inactive")),
        make_segment((1 * MiB, "active_allocated"), (1 * MiB, "inactive"), small=True, address=1 << 40),
        make_segment((30 * MiB, "active_allocated"), (10 * MiB, "inactive"), stream=7, address=2 << 40),
        make_segment((40 * MiB, "inactive"), pool=(1, 0), address=3 << 40),
    ]

    pools = by_pool(segments, in_use={(1, 0)})

    assert [(key.pool, key.stream, key.is_small) for key in pools] == [
        ((0, 0), 0, True),
        ((0, 0), 0, False),
        ((0, 0), 7, False),
        ((1, 0), 0, False),
    ]
    assert [space.kept for space in pools.values()] == [0, 0, 0, 40 * MiB]
    assert [space.largest_free for space in pools.values()] == [1 * MiB, 20 * MiB, 10 * MiB, 40 * MiB]


def test_an_expandable_segment_gives_back_whole_pages_inside_free_space() -> None:
    found = fragmentation([make_segment((5 * MiB, "active_allocated"), (55 * MiB, "inactive"), expandable=True)])

    assert (found.releasable, found.stranded) == (40 * MiB, 15 * MiB)


def test_blocks_that_will_be_freed_merge_with_their_free_neighbours() -> None:
    segment = make_segment((8 * MiB, "active_allocated"), (4 * MiB, "inactive"), (8 * MiB, "active_allocated"))

    assert fragmentation([segment], freed={0}).largest_free == 12 * MiB
    assert fragmentation([segment], freed={0, 12 * MiB}).releasable == 20 * MiB
