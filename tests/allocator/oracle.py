"""Golden runs of PyTorch's real allocator binaries, and what the model makes of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version

Json = dict[str, Any]


def read(path: Path) -> Json:
    """Return a run: version, settings, capacity, what the program asked for, and what the real allocator did."""
    run: Json = json.loads(gzip.decompress(path.read_bytes()))
    return run


def replay(run: Json, before_each: Callable[[CachingAllocator], None] = lambda _: None) -> CachingAllocator:
    """Let the model do what the program asked for. It is told no address but those that the driver gave."""
    model = CachingAllocator(
        AllocatorSettings.parse(run["conf"], parse_version(run["torch"])),
        run["capacity"],
        run["fraction"],
        run["torch"],
        SimulatedDriver(run["capacity"], run["driver_addresses"]),
    )
    addresses: dict[int, int] = {}
    for op in run["ops"]:
        before_each(model)
        match op:
            case ["m", name, size, stream, *_]:
                try:
                    addresses[name] = model.malloc(size, stream)
                except SimulatedOutOfMemoryError:
                    continue
            case ["f", name]:
                model.free(addresses.pop(name, 0))
            case ["e"]:
                model.empty_cache()
            case _:
                raise ValueError(f"what is {op}?")
    return model


def difference(run: Json) -> str:
    """Return where the model and the real allocator part, or nothing."""
    model = replay(run)
    expected = [tuple(event) for event in run["events"]]
    for index, (mine, real) in enumerate(zip(model.events, expected, strict=False)):
        if mine != real:
            return f"event {index}: the model has {mine}, the allocator had {real}"
    if len(model.events) != len(expected):
        return f"{len(model.events)} events in the model, {len(expected)} in the allocator"
    mine_last, real_last = _plain(model.segments()), _plain(run["segments"])
    for mine_segment, real_segment in zip(mine_last, real_last, strict=False):
        if mine_segment != real_segment:
            return f"segment: the model has {mine_segment}, the allocator had {real_segment}"
    return "" if len(mine_last) == len(real_last) else f"{len(mine_last)} segments, not {len(real_last)}"


def _plain(segments: list[Json]) -> list[Json]:
    keys = ("address", "total_size", "stream", "device", "is_expandable", "segment_type")
    return [
        {key: segment[key] for key in keys}
        | {
            "pool": tuple(segment["segment_pool_id"]),
            "blocks": [(block["size"], block["requested_size"], block["state"]) for block in segment["blocks"]],
        }
        for segment in segments
    ]


def as_snapshot(run: Json, cut: int = 0) -> Json:
    """Return a run in the form of `torch.cuda.memory._snapshot()`, without its first `cut` events."""
    trace = [
        {"action": action, ("device_free" if action == "oom" else "addr"): address, "size": size, "stream": stream}
        for action, address, size, stream in run["events"][cut:]
    ]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": run["conf"]}
    return {"segments": run["segments"], "device_traces": [trace], "allocator_settings": settings}


def peak_reserved(run: Json) -> int:
    """Return the most that was reserved at once."""
    reserved = peak = 0
    for action, _, size, _ in run["events"]:
        reserved += size * ((action in ("segment_alloc", "segment_map")) - (action in ("segment_free", "segment_unmap")))
        peak = max(peak, reserved)
    return peak
