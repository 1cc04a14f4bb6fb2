"""Replays of traces as they are found: begun mid-run, cut anywhere, on several devices, streams and pools."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nbguard.errors import SimulatedOutOfMemoryError, SnapshotError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import Addresses, SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.allocator.replay.replay import DeviceReplay, final_model, recorded_device, replay
from nbguard.memory.allocator.snapshot.snapshot import Sidecar, Snapshot, parse_snapshot
from tests.allocator import oracle
from tests.allocator.first_fit import FirstFit
from tests.allocator.test_oracle import RUNS

MIB = 2**20
Json = dict[str, Any]

CONF = {path: oracle.read(path)["conf"] for path in RUNS}
PLAIN = [path for path, conf in CONF.items() if "garbage" not in conf]
"""From the middle of a run the ages of blocks are unknown, which `garbage_collection_threshold` goes by."""


def new_model(conf: str = "", capacity: int | None = None, version: str = "2.11", seed: int = 1) -> CachingAllocator:
    driver = SimulatedDriver(capacity, addresses=Addresses("scattered", seed))
    return CachingAllocator(AllocatorSettings.parse(conf), capacity, None, version, driver)


def raw_snapshot(*models: CachingAllocator, cut: int = 0, conf: str = "") -> Json:
    """Return what PyTorch would have written of some devices, without the first `cut` events of each."""
    segments = [segment | {"device": number} for number, model in enumerate(models) for segment in model.segments()]
    traces = [
        [
            {"action": action, ("device_free" if action == "oom" else "addr"): address, "size": size, "stream": stream}
            for action, address, size, stream in model.events[cut:]
        ]
        for model in models
    ]
    return {"segments": segments, "device_traces": traces, "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf}}


def snapshot_of(raw: Json, version: str | None = None, capacity: int | None = None) -> Snapshot:
    return parse_snapshot(raw, 10**9, Sidecar(torch_version=version, settings=None, totals=(capacity,) * 3 if capacity else ()))


def assert_exact(found: tuple[DeviceReplay, ...], least: int) -> None:
    for each in found:
        assert each.first_difference is None
        assert each.reproduced == each.events >= least
        assert each.is_final_equal


def random_run(model: CachingAllocator, seed: int, steps: int, streams: tuple[int, ...] = (0,), largest: int = 40) -> None:
    rng, live = random.Random(seed), []
    for _ in range(steps):
        if rng.random() < 0.55 or not live:
            size = int(rng.choice((0.001, 0.3, 2, 5, 11, largest)) * MIB * rng.uniform(0.3, 1))
            try:
                live.append(model.malloc(size, rng.choice(streams)))
            except SimulatedOutOfMemoryError:
                for address in live[:: len(live) // 3 or 1]:
                    model.free(address)
                    live.remove(address)
        elif rng.random() < 0.98:
            model.free(live.pop(rng.randrange(len(live))))
        else:
            model.empty_cache()


@pytest.mark.parametrize("share", [0, 0.15, 0.3, 0.5, 0.85])
@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_golden_runs_cut_anywhere(path: Any, share: float) -> None:
    run = oracle.read(path)
    raw = oracle.as_snapshot(run, int(len(run["events"]) * share))

    found = replay(snapshot_of(raw, run["torch"], run["capacity"]))

    assert_exact(found, 400)


def test_three_devices_with_unmaps_and_an_out_of_memory_error() -> None:
    conf = "expandable_segments:True"
    models = [new_model(conf, capacity * MIB, seed=capacity) for capacity in (900, 500, 300)]
    for number, model in enumerate(models):
        random_run(model, number, 900)
    assert all({"segment_unmap", "segment_map"} <= {event[0] for event in model.events} for model in models)
    assert "oom" in {event[0] for event in models[2].events}

    found = replay(snapshot_of(raw_snapshot(*models, cut=300, conf=conf)))

    assert [each.device for each in found] == [0, 1, 2]
    assert_exact(found, 400)


@pytest.mark.parametrize("seed", range(6))
def test_expandable_segments_in_the_place_of_others(seed: int) -> None:
    conf = "expandable_segments:True"
    model = CachingAllocator(AllocatorSettings.parse(conf), 1200 * MIB, None, "2.13", FirstFit(1200 * MIB))
    for number in range(8):  # the largest come to lie in each other's place, and small ones there
        random_run(model, 10 * seed + number, 60, (0, 8, 16), largest=150)
        for address in list(model.live)[:: 1 + number % 2]:
            model.free(address)
        model.empty_cache()
    count = len(model.events)

    for cut in (0, count // 5, count // 2, count * 3 // 4):
        assert_exact(replay(snapshot_of(raw_snapshot(model, cut=cut, conf=conf), "2.13", 1200 * MIB)), 100)


def test_ten_streams() -> None:
    model = new_model(capacity=1500 * MIB)
    random_run(model, 5, 4000, tuple(range(0, 10 * 4096, 4096)))
    assert len({event[3] for event in model.events}) == 10

    assert_exact(replay(snapshot_of(raw_snapshot(model, cut=2000))), 4000)


@pytest.mark.parametrize("cut", [0, 1, 742, 742 * 2 + 300, 742 * 4 + 371])
def test_742_segments_freed_at_once(cut: int) -> None:
    model = new_model()
    held = [model.malloc((11 + number % 7) * MIB) for number in range(742)]
    kept = model.malloc(3 * MIB)
    for address in held:
        model.free(address)
    model.empty_cache()
    model.malloc(5 * MIB)
    model.free(kept)
    assert sum(event[0] == "segment_free" for event in model.events) == 742

    assert_exact(replay(snapshot_of(raw_snapshot(model, cut=cut))), 742 - 371)


def slack_run() -> tuple[CachingAllocator, int]:
    """A block of 19.5 MiB keeps 0.5 MiB that were not split off; the trace begins when its neighbour is free too."""
    model = new_model()
    whole = model.malloc(40 * MIB)
    model.free(whole)
    first, second = model.malloc(12 * MIB), model.malloc(28 * MIB)
    model.free(first)
    slack = model.malloc(12 * MIB - MIB // 2)
    model.free(second)
    cut = len(model.events)
    inside = model.malloc(4 * MIB)
    assert (slack, inside) == (whole, whole + 12 * MIB)
    model.free(slack)
    model.free(inside)
    return model, cut


def test_slack_from_before_the_trace_is_found_out() -> None:
    model, cut = slack_run()

    (found,) = replay(snapshot_of(raw_snapshot(model, cut=cut)))

    assert_exact((found,), 5)
    assert found.repairs == 1


def test_slack_that_shows_by_a_refusal() -> None:
    model = new_model()
    whole = model.malloc(40 * MIB)
    other = model.malloc(42 * MIB)
    model.free(whole)
    first, second = model.malloc(12 * MIB), model.malloc(28 * MIB)
    model.free(first)
    slack = model.malloc(12 * MIB - MIB // 2)
    model.free(second)
    model.free(other)
    cut = len(model.events)
    big = model.malloc(28 * MIB + MIB // 4)
    assert big == other
    model.free(slack)

    (found,) = replay(snapshot_of(raw_snapshot(model, cut=cut)))

    assert_exact((found,), 3)


@pytest.mark.parametrize("flushed", [False, True])
def test_slack_that_shows_by_a_new_segment(flushed: bool) -> None:
    model = new_model()
    model.free(model.malloc(40 * MIB))
    first, second = model.malloc(12 * MIB), model.malloc(28 * MIB)
    model.free(first)
    slack = model.malloc(12 * MIB - MIB // 2)
    model.free(second)
    cut = len(model.events)
    if flushed:
        model.free(model.malloc(50 * MIB))
        model.empty_cache()
    model.malloc(28 * MIB + MIB // 4)
    model.free(slack)

    (found,) = replay(snapshot_of(raw_snapshot(model, cut=cut)))

    assert_exact((found,), 4)
    assert found.repairs == 1


def test_blocks_that_wait_for_another_stream() -> None:
    model = new_model(capacity=400 * MIB)
    model.events_are_instant = False
    rng, live = random.Random(2), []
    for step in range(1500):
        if rng.random() < 0.55 or not live:
            live.append(model.malloc(rng.randrange(1, 3 * MIB), rng.choice((0, 8))))
        else:
            address = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.4:
                model.record_stream(address, 16)
            model.free(address)
        if step % 50 == 0:
            model.complete_events()
    assert model.pending

    for cut in (0, 1, 700, 1701):
        assert_exact(replay(snapshot_of(raw_snapshot(model, cut=cut))), 400)


@pytest.mark.parametrize("says_pool", [True, False])
def test_private_pools(says_pool: bool) -> None:
    version = "2.13" if says_pool else "2.11"
    model = new_model(version=version)
    pools = []
    live = []
    rng = random.Random(3)
    for _ in range(600):
        before = len(model.events)
        pool = rng.choice(((0, 0), (0, 0), (3, 0)))
        if rng.random() < 0.6 or not live:
            live.append((model.malloc(rng.randrange(1, 4 * MIB), pool=pool), pool))
        else:
            address, pool = live.pop(rng.randrange(len(live)))
            model.free(address)
        pools += [pool] * (len(model.events) - before)
    raw = raw_snapshot(model)
    if says_pool:
        for event, pool in zip(raw["device_traces"][0], pools, strict=True):
            event["pool_id"] = pool

    assert_exact(replay(snapshot_of(raw, version)), 800)


def test_a_private_pool_that_goes_back() -> None:
    model = new_model(version="2.13")
    kept = model.malloc(3 * MIB, pool=(1, 0))
    model.free(kept)
    everybodys = model.malloc(3 * MIB)
    model.free(everybodys)
    model.release_pool((1, 0))
    model.empty_cache()
    model.malloc(1)
    raw = raw_snapshot(model)
    for event in raw["device_traces"][0]:
        event["pool_id"] = [1, 0] if event["addr"] == kept else [0, 0]

    assert_exact(replay(snapshot_of(raw)), 9)


def test_what_was_changed_in_the_trace_is_said_and_followed() -> None:
    model = new_model()
    random_run(model, 1, 800)
    raw = raw_snapshot(model)
    trace = raw["device_traces"][0]
    large = [i for i, event in enumerate(trace) if event["action"] == "free_completed" and event["size"] > 2 * MIB]
    freed = next(i for i in large if i > 400)
    address = trace[freed]["addr"]
    position = max(i for i in range(freed) if trace[i]["action"] == "alloc" and trace[i]["addr"] == address)
    for event in trace[position : freed + 1]:
        event["addr"] += 512 * (event["addr"] == address)

    (found,) = replay(snapshot_of(raw))

    assert found.first_difference is not None
    assert found.first_difference.position == position
    assert found.first_difference.recorded[1] == address + 512
    assert found.first_difference.modelled is not None
    assert found.first_difference.modelled[1] == address
    assert found.events * 0.9 < found.reproduced < found.events


@pytest.mark.parametrize("change", ["alloc of nothing", "freed twice", "segment of nothing", "block outside"])
def test_a_trace_that_contradicts_its_end_is_refused(change: str) -> None:
    model = new_model()
    model.free(model.malloc(3 * MIB))
    model.malloc(5 * MIB)
    raw = raw_snapshot(model)
    trace = raw["device_traces"][0]
    match change:
        case "alloc of nothing":
            trace.append(trace[1] | {"addr": 512})
        case "freed twice":
            trace.append(next(event for event in trace if event["action"] == "free_completed") | {"addr": model.malloc(512)})
            raw["segments"] = model.segments()
        case "segment of nothing":
            trace.append({"action": "segment_alloc", "addr": 512, "size": 2 * MIB, "stream": 0})
        case "block outside":
            trace[:0] = [{"action": "free_requested", "addr": 512, "size": 5, "stream": 0}]
            trace.insert(1, {"action": "free_completed", "addr": 512, "size": 5, "stream": 0})

    with pytest.raises(SnapshotError, match="contradict each other"):
        replay(snapshot_of(raw))


def test_snapshot_events_and_others() -> None:
    model = new_model()
    model.malloc(3 * MIB)
    raw = raw_snapshot(model)
    note = {"action": "snapshot", "addr": 0, "size": 3 * MIB, "stream": 0}
    raw["device_traces"][0] += [note, {"action": "user_defined"}, note | {"size": 5}]

    (found,) = replay(snapshot_of(raw))

    assert (found.events, found.reproduced) == (4, 3)


def test_the_final_model_answers_what_would_fit() -> None:
    model = new_model(capacity=100 * MIB)
    address = model.malloc(30 * MIB)
    model.malloc(30 * MIB)
    model.free(address)
    device = recorded_device(snapshot_of(raw_snapshot(model), "2.11", 100 * MIB), 0)

    again = final_model(device)

    assert again.malloc(30 * MIB) == address
    with pytest.raises(SimulatedOutOfMemoryError):
        again.malloc(50 * MIB)
    assert again.malloc(40 * MIB)
