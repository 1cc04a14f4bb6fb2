"""Saving of a model as plain data, that makes a second model, which goes on exactly as the first would."""

from __future__ import annotations

from collections import deque
from typing import Any

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import FREE, LIVE, PENDING, UNMAPPED, BlockPool, ModelBlock
from nbguard.memory.allocator.model.driver import Addresses, Driver, Range, SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.plain_data import to_plain

Json = dict[str, Any]

_COUNTERS = (
    *("counter", "ticket", "done_ticket", "allocated", "requested", "reserved", "pending_bytes", "peak_allocated"),
    *("peak_reserved", "num_allocs", "num_frees", "num_alloc_retries", "num_ooms", "num_oom_rejections"),
    *("allocated_so_far", "num_device_alloc", "num_device_free", "num_sync_all_streams", "events_are_instant"),
)


def save(model: CachingAllocator) -> Json:
    """Return the state of a model as dicts, lists, numbers and strings, without its events."""
    driver = model.driver
    return {
        "settings": to_plain(model.settings),
        "capacity": model.capacity,
        "fraction": model.fraction,
        "torch_version": model.torch_version,
        "counters": {name: getattr(model, name) for name in _COUNTERS},
        "pools": [
            {
                "id": owner.id,
                "is_split": owner.is_split,
                "on_oom": owner.on_oom,
                "is_in_use": owner.is_in_use,
                "segments": owner.segments,
                "small": _half(owner.small),
                "large": _half(owner.large),
            }
            for owner in model.pools.values()
        ],
        "segments": [_chain(head) for head in _heads(model)],
        "pending": [block.address for block in model.pending],
        "waiting": [[stream, [[n, block.address] for n, block in queue]] for stream, queue in model.waiting.items()],
        "driver": _driver(driver) if isinstance(driver, SimulatedDriver) else None,
    }


def load(state: Json, driver: Driver | None = None) -> CachingAllocator:
    """Return a model in a saved state. A driver other than a `SimulatedDriver` is not saved and must be given."""
    settings = state["settings"]
    settings |= {"divisions": tuple(settings["divisions"]), "others": tuple(map(tuple, settings["others"]))}
    capacity, fraction = state["capacity"], state["fraction"]
    if driver is None and state["driver"] is not None:
        saved = state["driver"]
        driver = SimulatedDriver(saved["capacity"], saved["given"][::-1], Addresses(**saved["addresses"]), saved["used"])
        driver.calls = saved["calls"]
    model = CachingAllocator(AllocatorSettings(**settings), capacity, fraction, state["torch_version"], driver)
    for saved in state["pools"]:
        owner = model.create_pool(tuple(saved["id"]), no_split=not saved["is_split"], use_on_oom=saved["on_oom"])
        owner.is_in_use, owner.segments = saved["is_in_use"], saved["segments"]
        for half, kept in ((owner.small, saved["small"]), (owner.large, saved["large"])):
            half.searches = kept["searches"]
            for stream in kept["streams"]:
                half.of(stream)
    blocks: dict[int, ModelBlock] = {}
    for segment in state["segments"]:
        _link(model, segment, blocks)
    for name, value in state["counters"].items():
        setattr(model, name, value)
    model.pending = [blocks[address] for address in state["pending"]]
    model.waiting = {stream: deque((n, blocks[address]) for n, address in queue) for stream, queue in state["waiting"]}
    return model


def copy(model: CachingAllocator, driver: Driver | None = None) -> CachingAllocator:
    """Return a second model in the same state, to try requests on without a change of the first."""
    return load(save(model), driver)


def _driver(driver: SimulatedDriver) -> Json:
    return {
        "capacity": driver.capacity,
        "used": driver.used,
        "calls": driver.calls,
        "given": list(driver.given),
        "addresses": to_plain(driver.addresses),
    }


def _half(half: BlockPool) -> Json:
    return {"searches": half.searches, "streams": list(half.by_stream)}


def _heads(model: CachingAllocator) -> list[ModelBlock]:
    """Return the first block of each segment and range, by address."""
    free = [block for free_set in model.free_sets() for block in (*free_set.blocks, *free_set.unmapped)]
    first = [block for block in (*model.live.values(), *model.pending, *free) if block.prev is None]
    return sorted(first, key=lambda block: block.address)


def _chain(head: ModelBlock) -> Json:
    blocks = []
    block: ModelBlock | None = head
    while block is not None:
        streams = sorted(block.streams) if block.streams is not None else None
        row = [block.address, block.size, block.requested, block.state, block.rank, block.born, block.waits, streams]
        blocks.append(row)
        block = block.next
    space, home = head.range, head.home
    return {
        "pool": home.pool.owner.id,
        "is_small": home.pool.is_small,
        "stream": home.stream,
        "range": None if space is None else [space.base, space.size, space.page, space.counter],
        "blocks": blocks,
    }


def _link(model: CachingAllocator, segment: Json, blocks: dict[int, ModelBlock]) -> None:
    owner = model.pools[tuple(segment["pool"])]
    home = (owner.small if segment["is_small"] else owner.large).of(segment["stream"])
    space = None if segment["range"] is None else Range(*segment["range"])
    last: ModelBlock | None = None
    for address, size, requested, state, rank, born, waits, streams in segment["blocks"]:
        block = blocks[address] = ModelBlock(address, size, home, space, rank, state)
        block.requested, block.waits = requested, waits
        block.streams = None if streams is None else set(streams)
        if last is not None:
            block.put_after(last)
        last = block
        if state == LIVE:
            model.live[address] = block
        elif state == FREE:
            home.add(block)
        elif state == UNMAPPED:
            home.add_unmapped(block)
        else:
            assert state == PENDING
        block.born = born
