"""The largest request by `core`'s rule, against the model asked on copies of random states (docs/adr/0009)."""

from __future__ import annotations

import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.allocator.model.state import copy
from nbguard.memory.core.facts import Block, DeviceFacts, Segment
from nbguard.memory.core.requests import Room
from tests.allocator.test_properties import STREAMS, Program
from tests.thorough import examples

MIB = 2**20


def facts_of(model: CachingAllocator) -> DeviceFacts:
    """Return what a probe would find of a model's device."""
    found = tuple(
        Segment(
            address=each["address"],
            total_size=each["total_size"],
            is_small=each["segment_type"] == "small",
            is_expandable=each["is_expandable"],
            blocks=tuple(
                Block(address=b["address"], size=b["size"], state=b["state"], requested=b["requested_size"])
                for b in each["blocks"]
            ),
            stream=each["stream"],
            pool=tuple(each["segment_pool_id"]),
        )
        for each in model.segments()
    )
    return DeviceFacts(
        device="cuda:0",
        name="model",
        total=model.capacity,
        free=model.driver.free(),
        segments=found,
        settings=model.settings.conf(),
        limit=model.cap if model.cap is not None else model.capacity,
    )


def room_of(model: CachingAllocator) -> Room:
    return Room(
        device=facts_of(model), in_use=[pool for pool, owner in model.pools.items() if pool != (0, 0) and owner.is_in_use]
    )


def served(model: CachingAllocator, size: int) -> str:
    """Return how a request is served now: `cached`, `now`, `flushed`, or `no`; the model stays as it is."""
    tried = copy(model)
    tried.events_are_instant = model.events_are_instant
    allocations, retries = tried.num_device_alloc, tried.num_alloc_retries
    try:
        tried.malloc(size)
    except SimulatedOutOfMemoryError:
        return "no"
    if tried.num_alloc_retries > retries:
        return "flushed"
    return "now" if tried.num_device_alloc > allocations else "cached"


@st.composite
def states(draw: st.DrawFn, confs: tuple[str, ...], streams: tuple[int, ...] = STREAMS) -> CachingAllocator:
    capacity, conf = draw(st.integers(40, 500)) * MIB, draw(st.sampled_from(confs))
    fraction = draw(st.sampled_from((1.0, 0.7)))
    model = CachingAllocator(AllocatorSettings.parse(conf), capacity, fraction, "2.13", SimulatedDriver(capacity))
    model.events_are_instant = False
    pools = draw(st.sampled_from((((0, 0),), ((0, 0), (0, 0), (1, 0)))))
    program = Program(draw(st.integers(0, 10**6)), model, pools, streams)
    for _ in range(draw(st.integers(0, 60))):
        program.step()
    return model


def others(largest: int, capacity: int) -> set[int]:
    """Return sizes above `largest` that a rule could have got wrong."""
    near = {largest + step for step in (1, 512, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 20 * MIB)}
    rng = random.Random(largest)
    return near | {rng.randrange(largest + 1, 2 * capacity + largest) for _ in range(10)} | set(range(MIB, 21 * MIB, 3 * MIB))


@given(states(("", "max_split_size_mb:24")))
@settings(max_examples=examples(150))
def test_the_rule_is_the_models(model: CachingAllocator) -> None:
    room = room_of(model)
    found = room.largest()
    assert found.now is not None
    assert found.flushed is not None

    ways = {"cached": ("cached",), "now": ("cached", "now"), "flushed": ("cached", "now", "flushed")}
    if model.settings.max_split_size is not None:  # large cached blocks are given back one by one, before all are
        del ways["now"], ways["cached"]
    for name, allowed in ways.items():
        largest = getattr(found, name)
        if largest:
            assert served(model, largest) in allowed, name
        for size in others(largest, model.capacity or 0):
            if size > largest:
                assert served(model, size) not in allowed, (name, size)


@given(states(("", "expandable_segments:True")), st.integers(1, 600 * MIB))
@settings(max_examples=examples(150))
def test_fits_is_the_models_answer(model: CachingAllocator, size: int) -> None:
    assume(not model.settings.expandable or _is_simple(model))

    assert room_of(model).fits(size) == (served(model, size) != "no")


@given(states(("expandable_segments:True",)))
@settings(max_examples=150)  # of some thousands one differs: where the addresses that a segment may grow into end is not known
def test_the_end_of_an_expandable_segment(model: CachingAllocator) -> None:
    assume(_is_simple(model))
    found = room_of(model).largest()
    assert found.flushed is not None

    if found.flushed:
        assert served(model, found.flushed) != "no"
    for size in others(found.flushed, model.capacity or 0):
        if size > found.flushed:
            assert served(model, size) == "no", size


def test_where_an_expandable_segment_may_end_is_not_known() -> None:
    model = CachingAllocator(AllocatorSettings(expandable=True), 200 * MIB, None, "2.13", SimulatedDriver(200 * MIB))
    model.malloc(20 * MIB)
    assert not room_of(model).largest().is_growth_bound

    model.malloc(5 * MIB)

    assert room_of(model).largest().is_growth_bound


def _is_simple(model: CachingAllocator) -> bool:
    """Return whether the unmapped space of the default stream is all at the ends: what is in between, a snapshot hides."""
    halves = (model.pools[(0, 0)].small, model.pools[(0, 0)].large)
    return all(
        all(block.next is None for block in free.unmapped)
        for half in halves
        for stream, free in half.by_stream.items()
        if stream == 0
    )
