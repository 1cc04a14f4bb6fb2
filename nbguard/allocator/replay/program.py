"""The calls that a recorded program made to the allocator, without the way in which they were served."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nbguard.allocator.model.policy import DEFAULT_POOL, PoolId, segment_size
from nbguard.allocator.replay.replay import RecordedDevice

OpKind = Literal["request", "free", "refused", "empty_cache", "maybe_retry"]
"""A refused request ran out of memory when it was recorded. "maybe_retry" is where cached memory went back just before the
driver gave some: by `empty_cache()`, or because the driver had had no room."""

_MEMORY = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})
_RELEASES = frozenset({"segment_free", "segment_unmap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call of the program."""

    kind: OpKind  # of call, or of mark in the history
    name: int = 0  # number that a request and the free of its block have in common; -1 for a refused request
    size: int = 0  # bytes of a request
    stream: int = 0  # handle of the stream of a request
    pool: PoolId = DEFAULT_POOL  # of a request
    position: int = -1  # in the trace; -1 for a block from before the trace
    stack: int = -1  # index in `Snapshot.stacks` of the line that made the request; -1: none


def program(device: RecordedDevice) -> Iterator[Op]:
    """Yield the calls of a recorded program, those for blocks from before the trace first, by address."""
    names: dict[int, int] = {}
    start = device.start
    owners = {address: owner for address, (_, owner) in start.segments.items()}
    owners |= {first: owner for owner, stretches in start.mapped.items() for first, _ in stretches}
    places = sorted(owners)
    for block in sorted(start.blocks.values(), key=lambda block: block.address):
        pool, _, stream = owners[places[bisect_right(places, block.address) - 1]]
        names[block.address] = len(names)
        yield Op(kind="request", name=names[block.address], size=block.requested, stream=stream, pool=pool)
    count = len(names)
    events, pools, stacks = device.trace.events, device.trace.pools, device.trace.stacks
    position = 0
    while position < len(events):
        action, address, size, stream = events[position]
        pool = pools[position] if pools is not None else DEFAULT_POOL
        stack = stacks[position] if stacks else -1
        if action == "alloc":
            names[address] = count
            yield Op(kind="request", name=count, size=size, stream=stream, pool=pool, position=position, stack=stack)
            count += 1
        elif action == "oom":
            yield Op(kind="refused", name=-1, size=size, stream=stream, pool=pool, position=position, stack=stack)
        elif action == "free_completed" and address in names:
            yield Op(kind="free", name=names.pop(address), position=position)
        elif action in _RELEASES:
            position, op = _release(device, position)
            yield op
        position += 1


def _release(device: RecordedDevice, position: int) -> tuple[int, Op]:
    """Return the last position of a run of releases, and the call that caused them."""
    events, first = device.trace.events, position
    while position + 1 < len(events) and events[position + 1][0] in _RELEASES:
        position += 1
    end = position + 1
    while end < len(events) and events[end][0] in _MEMORY:
        end += 1
    is_followed = end < len(events) and (events[end][0] == "oom" or (events[end][0] == "alloc" and end > position + 1))
    return position, Op(kind="maybe_retry" if is_followed else "empty_cache", position=first)


def usable_bytes(device: RecordedDevice) -> int | None:
    """Return the bytes that the allocator could have in all, as an out-of-memory event shows; None without such an event.

    They are the bytes reserved then and those that the driver had left. Where these would have been enough for the request,
    a memory fraction was the limit, one byte below the bytes that the request would have led to.
    """
    reserved = device.start.reserved
    for action, address, size, _ in device.trace.events:
        if action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in _RELEASES:
            reserved -= size
        elif action == "oom" and address >= 0:
            asked = segment_size(size, device.settings.large_segment)
            return reserved + (address if address < asked else asked - 1)
    return None
