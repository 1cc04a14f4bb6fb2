"""The cheapest release for a request, carried out on copies of random states of the allocator's model."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.allocator.model.state import copy
from nbguard.memory.cleanup.plan.cheapest import Release, cheapest_release
from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts
from nbguard.units import MiB
from tests.allocator.test_largest import served
from tests.out_of_memory.test_against_the_model import facts_on, failures, is_alone
from tests.thorough import examples

SIZES = st.one_of(st.integers(MiB, 11 * MiB), st.sampled_from([512, MiB + 1, 5 * MiB, 9 * MiB, 10 * MiB, 21 * MiB, 60 * MiB]))


def freed_by(analysis: Analysis, release: Release) -> set[int]:
    """Return the addresses of the storages that the commands of a release free."""
    graph = analysis.facts.graph
    labels = {root.label: root.nodes for root in graph.roots}
    numbers = {number for name in release.names for node in labels[name] for number in graph.nodes[node].storages}
    stale = analysis.once(default_plan).storages  # unreachable cycles, which go with every cleanup
    return {graph.storages[number].address for number in numbers | (stale if release.advice else set())}


def after_cleanup(model: CachingAllocator, freed: Collection[int]) -> CachingAllocator:
    """Return the model after a cleanup that frees the blocks at these addresses: every cleanup empties the cache."""
    after = copy(model)
    after.events_are_instant = True
    for address in freed:
        after.free(address)
    after.complete_events()
    after.empty_cache()
    return after


@given(failures(("", "expandable_segments:True")), SIZES)
@settings(max_examples=examples(100), deadline=None)
def test_a_release_that_is_enough_is_enough(failure: tuple[CachingAllocator, Facts], nbytes: int) -> None:
    model, facts = failure
    assume(is_alone(model))
    analysis = Analysis(facts)

    release = cheapest_release(analysis.devices[0], nbytes)

    if release.enough:
        after = after_cleanup(model, freed_by(analysis, release)) if release.advice else model
        assert served(after, nbytes) != "no"
    else:
        assert release.enough is False
        assert served(model, nbytes) == "no"


def full_model(sizes: Collection[int]) -> tuple[CachingAllocator, list[int]]:
    """Return a device that is full with blocks of these sizes, each allocated by itself, and their addresses."""
    capacity = sum(sizes)
    model = CachingAllocator(AllocatorSettings.parse(""), capacity, 1.0, "2.13", SimulatedDriver(capacity))
    return model, [model.malloc(size) for size in sizes]


def test_a_segment_that_the_cleanup_itself_gives_back_is_no_hole() -> None:
    """A request of 5 MiB wants a new segment of 20 MiB: 12 MiB that went back to the device with the cleanup are too few."""
    model, _ = full_model([12 * MiB])
    facts = facts_on(model, frozenset(), 5 * MiB)
    assert served(after_cleanup(model, [storage.address for storage in facts.graph.storages]), 5 * MiB) == "no"

    release = cheapest_release(Analysis(facts).devices[0], 5 * MiB)

    assert release.enough is False
    assert release.advice == ()


def test_a_hole_that_the_cleanup_leaves_is_one() -> None:
    model, _ = full_model([12 * MiB, 30 * MiB])
    analysis = Analysis(facts_on(model, frozenset(), 5 * MiB))

    release = cheapest_release(analysis.devices[0], 5 * MiB)

    assert (release.enough, release.names, release.lost) == (True, ("t1",), 30 * MiB)
    assert served(after_cleanup(model, freed_by(analysis, release)), 5 * MiB) != "no"


def test_a_stale_segment_that_goes_back_is_no_hole() -> None:
    model, addresses = full_model([12 * MiB, 30 * MiB])
    analysis = Analysis(facts_on(model, frozenset(addresses[:1]), 5 * MiB))

    release = cheapest_release(analysis.devices[0], 5 * MiB)

    assert (release.enough, release.names) == (True, ("t1",))
    assert served(after_cleanup(model, freed_by(analysis, release)), 5 * MiB) != "no"
