"""What the golden runs do not have: other streams' use, private pools, refusal at once, and misuse."""

from __future__ import annotations

import pytest

from nbguard.errors import ModelError, SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import AllocatorSettings

MIB = 1024**2


def actions(model: CachingAllocator) -> list[str]:
    return [event[0] for event in model.events]


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    model = CachingAllocator()
    model.events_are_instant = False
    address = model.malloc(MIB)
    model.record_stream(address, 7)
    model.free(address)

    assert actions(model) == ["segment_alloc", "alloc", "free_requested"]
    assert (model.allocated, model.active, model.requested) == (0, MIB, MIB)
    assert model.segments()[0]["blocks"][0]["state"] == "active_pending_free"
    assert model.malloc(512) == address + MIB

    model.complete_events()
    model.malloc(512)

    assert actions(model)[3:] == ["alloc", "free_completed", "alloc"]
    assert model.active == model.requested == 1024


def test_a_stream_is_done_in_order() -> None:
    model = CachingAllocator()
    model.events_are_instant = False
    first, second = model.malloc(512), model.malloc(512)
    model.record_stream(first, 7)
    model.record_stream(second, 7)
    model.free(first)
    model.complete_events()
    model.free(second)
    model.malloc(2 * MIB)

    assert [event[1] for event in model.events if event[0] == "free_completed"] == [first]


def test_emptying_the_cache_waits_for_streams() -> None:
    model = CachingAllocator()
    model.events_are_instant = False
    address = model.malloc(MIB)
    model.record_stream(address, 7)
    model.free(address)
    model.empty_cache()

    assert actions(model)[2:] == ["free_requested", "free_completed", "segment_free"]
    assert model.reserved == 0


def test_the_owning_stream_is_no_other_stream() -> None:
    model = CachingAllocator()
    address = model.malloc(MIB, stream=7)
    model.record_stream(address, 7)
    model.free(address)

    assert actions(model)[-1] == "free_completed"


def test_a_private_pool_keeps_its_memory_while_in_use() -> None:
    model = CachingAllocator()
    mine, everybodys = model.malloc(MIB, pool=(1, 0)), model.malloc(MIB)
    model.free(mine)
    model.free(everybodys)
    model.empty_cache()

    assert [segment["segment_pool_id"] for segment in model.segments()] == [(1, 0)]
    assert model.malloc(MIB, pool=(1, 0)) == mine
    model.free(mine)
    model.release_pool((1, 0))
    model.empty_cache()

    assert model.segments() == []
    assert (1, 0) not in model.pools


def test_a_pool_that_does_not_split_and_one_for_emergencies() -> None:
    model = CachingAllocator(capacity=64 * MIB)
    model.create_pool((0, 1), no_split=True, use_on_oom=True)
    spare = model.malloc(40 * MIB, pool=(0, 1))
    model.free(spare)
    model.malloc(20 * MIB)

    assert model.malloc(30 * MIB) == spare
    assert model.live[spare].size == 40 * MIB
    assert "oom" not in actions(model)


def test_a_pool_that_nobody_uses_any_more_lends_nothing() -> None:
    model = CachingAllocator(capacity=64 * MIB)
    model.create_pool((0, 1), use_on_oom=True)
    kept = model.malloc(5 * MIB, pool=(0, 1))
    model.free(model.malloc(40 * MIB, pool=(0, 1)))
    model.release_pool((0, 1))
    model.malloc(30 * MIB)

    assert actions(model)[-3:] == ["segment_free", "segment_alloc", "alloc"]
    assert kept in model.live


def test_out_of_memory_is_tried_again_before_it_is_told() -> None:
    model = CachingAllocator(capacity=100 * MIB)
    model.free(model.malloc(60 * MIB))
    model.malloc(70 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        model.malloc(40 * MIB)

    assert actions(model)[3:] == ["free_completed", "segment_free", "segment_alloc", "alloc", "oom"]
    assert model.events[-1] == ("oom", 30 * MIB, 40 * MIB, 0)
    assert (model.num_alloc_retries, model.num_ooms) == (2, 1)
    assert (caught.value.size, caught.value.free) == (40 * MIB, 30 * MIB)


def test_refused_at_once_where_the_settings_say_so() -> None:
    conf = "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"
    model = CachingAllocator(AllocatorSettings.parse(conf), 100 * MIB)
    model.free(model.malloc(40 * MIB))
    with pytest.raises(SimulatedOutOfMemoryError):
        model.malloc(45 * MIB)

    assert "oom" not in actions(model)
    assert (model.num_oom_rejections, model.num_ooms, model.reserved) == (1, 0, 40 * MIB)


def test_expandable_segments_switched_off_later() -> None:
    model = CachingAllocator(AllocatorSettings(expandable=True), 10 * 1024 * MIB)
    model.free(model.malloc(30 * MIB))
    model.apply(AllocatorSettings())
    model.malloc(30 * MIB)

    assert actions(model)[-2:] == ["segment_alloc", "alloc"]


def test_expandable_pages_too_large_to_split_are_never_used_again() -> None:
    model = CachingAllocator(AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:20"), 1024 * MIB)
    address = model.malloc(40 * MIB)
    model.malloc(40 * MIB)
    model.free(address)
    model.malloc(8 * MIB)

    assert model.reserved == 100 * MIB


@pytest.mark.parametrize("misuse", ["double", "unknown", "negative", "record", "pool"])
def test_misuse_is_said(misuse: str) -> None:
    model = CachingAllocator()
    address = model.malloc(1)
    model.free(address)
    calls = {
        "double": lambda: model.free(address),
        "unknown": lambda: model.free(12345),
        "negative": lambda: model.malloc(-1),
        "record": lambda: model.record_stream(address, 1),
        "pool": lambda: model.release_pool((0, 0)),
    }

    with pytest.raises(ModelError):
        calls[misuse]()


def test_no_bytes_are_no_block() -> None:
    model = CachingAllocator()

    assert model.malloc(0) == 0
    model.free(0)
    assert model.events == []
