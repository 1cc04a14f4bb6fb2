from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbguard.core.facts import Segment
from nbguard.core.fragmentation import fragmentation
from nbguard.testing import make_segment

MiB = 1024**2
_STATES = st.sampled_from(["active_allocated", "active_pending_free", "inactive"])


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    found = []
    for number in range(draw(st.integers(0, 5))):
        blocks = draw(st.lists(st.tuples(st.integers(1, 64).map(lambda n: n * 512 * 1024), _STATES), min_size=1, max_size=6))
        flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
        found.append(make_segment(*blocks, address=number << 40, expandable=flags[0], small=flags[1], private=flags[2]))
    return found


@given(segments())
def test_the_parts_re_add_to_what_is_reserved(found: list[Segment]) -> None:
    result = fragmentation(found)

    assert result.allocated + result.pending + result.releasable + result.stranded == result.reserved
    assert min(result.allocated, result.pending, result.releasable, result.stranded) >= 0


def test_one_live_block_strands_the_rest_of_its_segment() -> None:
    found = fragmentation([make_segment((1 * MiB, "active_allocated"), (19 * MiB, "inactive"))])

    assert (found.releasable, found.stranded, found.largest_free) == (0, 19 * MiB, 19 * MiB)


def test_a_free_segment_is_releasable() -> None:
    assert fragmentation([make_segment((20 * MiB, "inactive"))]).releasable == 20 * MiB


def test_a_private_pool_in_use_gives_nothing_back() -> None:
    assert fragmentation([make_segment((20 * MiB, "inactive"), private=True)]).releasable == 0


def test_an_expandable_segment_gives_back_whole_pages_inside_free_space() -> None:
    found = fragmentation([make_segment((5 * MiB, "active_allocated"), (55 * MiB, "inactive"), expandable=True)])

    assert (found.releasable, found.stranded) == (40 * MiB, 15 * MiB)


def test_blocks_that_will_be_freed_merge_with_their_free_neighbours() -> None:
    segment = make_segment((8 * MiB, "active_allocated"), (4 * MiB, "inactive"), (8 * MiB, "active_allocated"))

    assert fragmentation([segment], freed={0}).largest_free == 12 * MiB
    assert fragmentation([segment], freed={0, 12 * MiB}).releasable == 20 * MiB
