"""Runs in which a stretch of calls that repeats is played once come out as runs in which all is played."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import Addresses
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.allocator.replay import cell_program as calls_module
from nbguard.memory.allocator.replay import cell_program as run_module
from nbguard.memory.allocator.replay.cell_program import Run, program
from nbguard.memory.allocator.replay.replay import RecordedDevice, recorded_device
from tests.allocator.test_replay import new_model, raw_snapshot, snapshot_of
from tests.thorough import examples

MIB = 2**20

CONFS = ("", "expandable_segments:True", "max_split_size_mb:64", "garbage_collection_threshold:0.6")


def train(model: CachingAllocator, seed: int, steps: int) -> None:
    """Train: steps of two or three kinds, each of which frees what the one before it has left; now and then something stays."""
    rng = random.Random(seed)
    kinds = [[int(rng.choice((0.01, 0.4, 3, 12, 30)) * MIB * rng.uniform(0.5, 1)) for _ in range(12)] for _ in range(3)]
    for size in kinds[0][:4]:
        model.malloc(size)
    left: list[int] = []
    for number in range(steps):
        blocks, before = [], left
        for place, size in enumerate(rng.choice(kinds)):
            try:
                blocks.append(model.malloc(size, stream=int(place % 5 == 4)))
            except SimulatedOutOfMemoryError:
                model.empty_cache()
            if place == 6:
                for address in before:
                    model.free(address)
        for address in blocks[3:]:
            model.free(address)
        left = blocks[:3]
        if number % 17 == 16:
            model.empty_cache()
            left = left[1:]


def recorded(seed: int, capacity: int | None = None, cut: int = 0, steps: int = 40) -> RecordedDevice:
    model = new_model(capacity=capacity)
    train(model, seed, steps)
    return recorded_device(snapshot_of(raw_snapshot(model, cut=cut), "2.11", capacity), 0)


def run_of(device: RecordedDevice, conf: str, capacity: int | None, version: str, remembers: bool) -> Run:
    run = Run(device, program(device), AllocatorSettings.parse(conf), capacity, version, Addresses("scattered", 2))
    run.remembers = run.remembers and remembers
    return run


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 10**6),
    cut=st.sampled_from((0, 300)),
    conf=st.sampled_from(CONFS),
    roomy=st.booleans(),
    version=st.sampled_from(("2.11", "2.12")),
)
def test_what_repeats_comes_out_as_played(seed: int, cut: int, conf: str, roomy: bool, version: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls_module, "_LEAST", 6)
        patch.setattr(calls_module, "_MOST", 60)
        capacity = None if roomy else 150 * MIB
        device = recorded(seed, capacity, cut)
        limit = None if capacity is None else capacity - 20 * MIB

        outcomes = [run_of(device, conf, limit, version, remembers).outcome() for remembers in (True, False)]

        assert outcomes[0] == outcomes[1]


def test_a_step_that_repeats_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_LEAST", 12)
    monkeypatch.setattr(calls_module, "_MOST", 60)
    model = new_model()
    model.malloc(5 * MIB)
    for _ in range(200):
        for address in [model.malloc(size * MIB) for size in (1, 3, 12, 30, 2, 7, 4)]:
            model.free(address)
    device = recorded_device(snapshot_of(raw_snapshot(model), "2.11"), 0)
    run = run_of(device, "", None, "2.11", remembers=True)

    run.outcome()

    assert 0 < len(run.effects) < 10 < 100 < len(run.calls.occurrences)
    assert run.calls.requests == sum(event[0] in ("alloc", "oom") for event in device.trace.events)


@pytest.mark.parametrize("limit", [0, 30_000])
def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(calls_module, "_LEAST", 12)
    monkeypatch.setattr(calls_module, "_MOST", 60)
    device = recorded(7, steps=400)
    all_remembered = run_of(device, "", None, "2.11", remembers=True)
    expected = all_remembered.outcome()
    assert all_remembered.remembered > 2 * 30_000
    monkeypatch.setattr(run_module, "_REMEMBERED", limit)
    run = run_of(device, "", None, "2.11", remembers=True)

    assert run.outcome() == expected
    assert run.remembered == sum(len(effect.state) for effect in run.effects.values()) <= limit
    assert bool(run.effects) == bool(limit)


def test_where_age_decides_among_equal_blocks_all_is_played() -> None:
    device = recorded(7)
    run = run_of(device, "", None, "2.12", remembers=True)

    run.outcome()

    assert not run.effects
