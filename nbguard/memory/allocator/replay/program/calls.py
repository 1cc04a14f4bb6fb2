"""The calls that a recorded program made to the allocator, without the way they were served."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from nbguard.memory.allocator.model.policy import DEFAULT_POOL, PoolId, segment_size
from nbguard.memory.allocator.replay.replay import RecordedDevice

FREE, EMPTY_CACHE, MAYBE_RETRY = -1, -2, -3
"""Codes of calls that are no requests. `MAYBE_RETRY` is where cached memory went back just before the driver gave some: by
`empty_cache()`, or because the driver had had no room. A request is coded as twice the index of its stream and pool in
`Program.places`; one more, where it ran out of memory when it was recorded."""

_MEMORY = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})
_RELEASES = frozenset({"segment_free", "segment_unmap"})

_LEAST, _MOST = 256, 8192
"""Calls of a stretch. In between it ends where no more memory is in use than at its start: in a training loop, with a step."""


@dataclass(slots=True, eq=False)
class Stretch:
    """Calls in a row, written so that the steps of a training loop are one and the same stretch."""

    calls: array[int]  # codes
    amounts: array[int]  # bytes of a request; of a free, the request's number in this stretch, or ~ index in `Occurrence.outer`
    times: int = 0  # occurrences in the program


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An occurrence of a stretch."""

    stretch: Stretch
    first: int  # number of its first request in the program
    outer: tuple[int, ...]  # numbers of the earlier requests whose blocks it frees


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a recorded program, those for blocks from before the trace first, by address."""

    places: list[tuple[int, PoolId]] = field(default_factory=list)  # (handle of a stream, pool) of requests
    positions: array[int] = field(default_factory=lambda: array("q"))  # of requests in the trace; -1: from before it
    occurrences: list[Occurrence] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The requests of the program, those that were refused among them."""
        return len(self.positions)


def program(device: RecordedDevice) -> Program:
    """Return the calls that led to the trace of a device."""
    writer = _Writer()
    start = device.start
    owners = {address: owner for address, (_, owner) in start.segments.items()}
    owners |= {first: owner for owner, stretches in start.mapped.items() for first, _ in stretches}
    places = sorted(owners)
    for block in sorted(start.blocks.values(), key=lambda block: block.address):
        pool, _, stream = owners[places[bisect_right(places, block.address) - 1]]
        writer.request(block.address, block.requested, stream, pool, -1)
    pools = device.trace.pools
    released = -1  # the last position of the releases that are written
    for position, (action, address, size, stream) in enumerate(device.trace.events):
        if action == "alloc":
            writer.request(address, size, stream, pools[position] if pools is not None else DEFAULT_POOL, position)
        elif action == "free_completed":
            writer.free(address)
        elif action == "oom":
            writer.refused(size, stream, pools[position] if pools is not None else DEFAULT_POOL, position)
        elif action in _RELEASES and position > released:
            released, code = _release(device, position)
            writer.call(code, 0)
    return writer.end()


class _Writer:
    """A program that is being written, call by call, and cut into stretches."""

    def __init__(self) -> None:
        self.program = Program()
        self.place_of: dict[tuple[int, PoolId], int] = {}
        self.stretches: dict[tuple[bytes, bytes], Stretch] = {}
        self.blocks: dict[int, tuple[int, int]] = {}
        """(number of the request, bytes) of each block in use, by address."""
        self.in_use = self.least = 0
        """Bytes now, and at the start of the stretch."""
        self._begin()

    def _begin(self) -> None:
        self.calls, self.amounts, self.outer = array("i"), array("q"), array("q")
        self.first, self.least = self.program.requests, self.in_use

    def request(self, address: int, size: int, stream: int, pool: PoolId, position: int) -> None:
        """Write a request that was served."""
        self.blocks[address] = (self.program.requests, size)
        self.in_use += size
        self.program.positions.append(position)
        self.call(self._place(stream, pool), size)

    def refused(self, size: int, stream: int, pool: PoolId, position: int) -> None:
        """Write a request that ran out of memory."""
        self.program.positions.append(position)
        self.call(self._place(stream, pool) + 1, size)

    def free(self, address: int) -> None:
        """Write that a block is free, unless it was never requested."""
        if (block := self.blocks.pop(address, None)) is None:
            return
        number, size = block
        self.in_use -= size
        if number < self.first:
            self.outer.append(number)
            self.call(FREE, -len(self.outer))
        else:
            self.call(FREE, number - self.first)

    def call(self, code: int, amount: int) -> None:
        """Write a call."""
        self.calls.append(code)
        self.amounts.append(amount)
        length = len(self.calls)
        if length >= _LEAST and (self.in_use <= self.least or length >= _MOST):
            self._cut()

    def end(self) -> Program:
        """Return the program."""
        self._cut()
        return self.program

    def _place(self, stream: int, pool: PoolId) -> int:
        place = self.place_of.setdefault((stream, pool), len(self.place_of))
        if place == len(self.program.places):
            self.program.places.append((stream, pool))
        return 2 * place

    def _cut(self) -> None:
        if self.calls:
            new = Stretch(self.calls, self.amounts)
            stretch = self.stretches.setdefault((self.calls.tobytes(), self.amounts.tobytes()), new)
            stretch.times += 1
            self.program.occurrences.append(Occurrence(stretch, self.first, tuple(self.outer)))
        self._begin()


def _release(device: RecordedDevice, position: int) -> tuple[int, int]:
    """Return the last position of a run of releases, and the code of the call that caused them."""
    events = device.trace.events
    while position + 1 < len(events) and events[position + 1][0] in _RELEASES:
        position += 1
    end = position + 1
    while end < len(events) and events[end][0] in _MEMORY:
        end += 1
    is_followed = end < len(events) and (events[end][0] == "oom" or (events[end][0] == "alloc" and end > position + 1))
    return position, MAYBE_RETRY if is_followed else EMPTY_CACHE


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
