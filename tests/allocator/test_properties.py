"""Random programs: invariants at every step, a saved model goes on as the first, and its own trace replays."""

from __future__ import annotations

import json
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import Addresses, SimulatedDriver
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, AllocatorSettings, PoolId
from nbguard.memory.allocator.model.state import copy, load, save
from nbguard.memory.allocator.replay.replay import replay
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, parse_snapshot
from tests.allocator.invariants import check
from tests.thorough import examples

MIB = 2**20
CONFS = (
    *("", "expandable_segments:True", "max_split_size_mb:24", "garbage_collection_threshold:0.4"),
    *("roundup_power2_divisions:4", "roundup_power2_divisions:[1:8,16:2,>:1]", "large_segment_size_mb:14"),
    *("expandable_segments:True,max_split_size_mb:20", "expandable_segments:True,large_segment_size_mb:12"),
    "max_split_size_mb:30,max_non_split_rounding_mb:40,garbage_collection_threshold:0.3,roundup_power2_divisions:2",
)
SIZES = (1, 512, 513, 4000, MIB - 1, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 19 * MIB, 21 * MIB, 33 * MIB + 7, 70 * MIB)
DEFAULT_ONLY: tuple[PoolId, ...] = (DEFAULT_POOL,)
POOLS = ((0, 0),) * 6 + ((1, 0), (0, 2))


STREAMS = (0, 0, 8, 16)


class Program:
    """Calls drawn from a seed, so that two models can be given the same ones; `streams` are those of everybody's pool."""

    def __init__(
        self, seed: int, model: CachingAllocator, pools: tuple[PoolId, ...] = POOLS, streams: tuple[int, ...] = STREAMS
    ) -> None:
        self.pools, self.streams = pools, streams
        self.rng = random.Random(seed)
        self.model = model
        self.live: list[int] = []

    def step(self) -> None:
        rng, model = self.rng, self.model
        what = rng.random()
        if what < 0.52 or not self.live:
            size, pool = int(rng.choice(SIZES) * rng.choice((1, 1, 0.7)) + 1), rng.choice(self.pools)
            try:
                self.live.append(model.malloc(size, rng.choice(self.streams if pool == (0, 0) else STREAMS), pool))
            except SimulatedOutOfMemoryError:
                self.free(len(self.live) // 2)
        elif what < 0.95:
            self.free(1)
        elif what < 0.97:
            model.empty_cache()
        elif what < 0.98:
            model.complete_events()
        else:
            model.record_stream(rng.choice(self.live), rng.choice((0, 8, 24)))

    def free(self, count: int) -> None:
        for _ in range(min(count, len(self.live))):
            self.model.free(self.live.pop(self.rng.randrange(len(self.live))))


def models() -> st.SearchStrategy[CachingAllocator]:
    def build(conf: str, version: str, capacity: int, fraction: float, order: str, instant: bool) -> CachingAllocator:
        driver = SimulatedDriver(capacity * MIB, addresses=Addresses(order, 3))  # type: ignore[arg-type]
        model = CachingAllocator(AllocatorSettings.parse(conf), capacity * MIB, fraction, version, driver)
        model.events_are_instant = instant
        return model

    return st.builds(
        build,
        st.sampled_from(CONFS),
        st.sampled_from(("2.9", "2.11", "2.12", "2.13", "2.15")),
        st.integers(60, 700),
        st.sampled_from((1.0, 0.7)),
        st.sampled_from(("ascending", "descending", "scattered")),
        st.booleans(),
    )


@settings(max_examples=examples(60))
@given(models(), st.integers(0, 2**32), st.integers(1, 250))
def test_invariants_hold_at_every_step(model: CachingAllocator, seed: int, steps: int) -> None:
    program = Program(seed, model)
    for _ in range(steps):
        program.step()
        check(model)
    for address in program.live:
        model.free(address)
    for pool in [pool for pool in model.pools if pool != (0, 0)]:
        model.release_pool(pool)
    model.empty_cache()
    check(model)

    assert (model.reserved, model.active, model.segments()) == (0, 0, [])


@settings(max_examples=examples(40))
@given(models(), st.integers(0, 2**32), st.integers(0, 150), st.integers(1, 100))
def test_a_saved_model_goes_on_as_the_first(model: CachingAllocator, seed: int, before: int, after: int) -> None:
    program = Program(seed, model)
    for _ in range(before):
        program.step()
    model.events.clear()
    second = load(json.loads(json.dumps(save(model))))
    check(second)
    follower = Program(0, second)
    follower.rng.setstate(program.rng.getstate())
    follower.live = list(program.live)

    for each in (program, follower):
        for _ in range(after):
            each.step()

    assert second.events == model.events
    assert json.dumps(save(second)) == json.dumps(save(model))
    assert second.stats() == model.stats()


def test_a_copy_is_apart() -> None:
    model = CachingAllocator(capacity=100 * MIB)
    address = model.malloc(5 * MIB)
    before = save(model)

    other = copy(model)
    other.free(address)
    other.malloc(90 * MIB)

    assert save(model) == before


@settings(max_examples=examples(40))
@given(
    st.sampled_from([conf for conf in CONFS if "garbage" not in conf]),
    st.integers(0, 2**32),
    st.floats(0, 0.95),
    st.sampled_from(("2.11", "2.13")),
)
@example("max_split_size_mb:24", 15101, 0.875, "2.11")  # a new segment tells that a free block from before was smaller
@example("expandable_segments:True,max_split_size_mb:20", 16859, 0.6197356351095704, "2.11")  # cut after unmapping
@example("expandable_segments:True,max_split_size_mb:20", 25005, 0.7215008615923647, "2.11")  # a retry fills a range
def test_any_part_of_a_trace_replays(conf: str, seed: int, cut: float, version: str) -> None:
    parsed = AllocatorSettings.parse(conf)
    driver = SimulatedDriver(400 * MIB, addresses=Addresses("scattered", seed))
    model = CachingAllocator(parsed, 400 * MIB, None, version, driver)
    program = Program(seed, model, DEFAULT_ONLY)
    for _ in range(300):
        program.step()
    start = int(len(model.events) * cut)
    trace = [
        {"action": action, ("device_free" if action == "oom" else "addr"): address, "size": size, "stream": stream}
        for action, address, size, stream in model.events[start:]
    ]
    table = {str(1 << index): entry for index, entry in enumerate(parsed.divisions)}
    raw = {"segments": model.segments(), "device_traces": [trace]}
    raw["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": conf, "roundup_power2_divisions": table}

    (found,) = replay(parse_snapshot(raw, 10**9, Sidecar(torch_version=version, settings=None, totals=(400 * MIB,))))

    assert found.first_difference is None
    assert found.is_final_equal
    assert found.reserved == model.reserved
