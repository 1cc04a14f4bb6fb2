"""The calls of a recorded program, and one run of it from an empty allocator, where repetitions are run once."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import Addresses, SimulatedDriver
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, AllocatorSettings, PoolId, segment_size
from nbguard.memory.allocator.model.state import load, save
from nbguard.memory.allocator.replay.replay import RecordedDevice

# --- The calls that a recorded program made to the allocator, without the way they were served.


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


_LEVELS = ("allocated", "requested", "reserved", "pending_bytes", "events_are_instant")
"""The counters of a model that go with its blocks; the others only grow, and change nothing that comes after."""

_REMEMBERED = 128 << 20
"""Bytes of states that a run remembers at most. Beyond it the oldest go, and are played again where they come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that found no room."""

    position: int  # in the trace; -1 for a block from before the trace
    number: int  # of the request, counted from 1
    size: int  # bytes requested
    allocated: int  # bytes in use at that moment (`allocated_bytes.all.current`)
    reserved: int  # bytes reserved at that moment (`reserved_bytes.all.current`)
    holders: tuple[tuple[int, int, int], ...] = ()  # (index in `Snapshot.stacks` or -1, bytes, blocks), the largest five


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOutcome:
    """The result of one run under some settings."""

    peak_reserved: int  # bytes (`reserved_bytes.all.peak`)
    peak_allocated: int  # bytes (`allocated_bytes.all.peak`)
    refusal: Refusal | None  # the first request without room; None if all were served
    passed: int  # requests that were refused when recorded, and served in this run
    retries: int  # requests that had the cache emptied (`num_alloc_retries`)
    driver_calls: int  # to cudaMalloc and cudaFree, or to map and unmap pages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    """The effect of a stretch of calls on an allocator in a certain state."""

    state: str  # after it
    blocks: tuple[tuple[int, int], ...]  # (number in the stretch, address) of the requests whose blocks stay
    peak_reserved: int  # bytes, within the stretch
    peak_allocated: int  # bytes, within the stretch
    passed: int
    retries: int
    driver_calls: int


class Run:
    """A run of a recorded program up to its end, or to the first request that is refused in this run only.

    Args:
        source: the device that recorded the program.
        calls: the program.
        settings: of the allocator.
        capacity: bytes that the allocator can have in all; None if no request is to be refused.
        torch_version: whose rules apply.
        addresses: the order of the driver's addresses.
    """

    def __init__(
        self,
        source: RecordedDevice,
        calls: Program,
        settings: AllocatorSettings,
        capacity: int | None,
        torch_version: str,
        addresses: Addresses | None = None,
    ) -> None:
        self.source, self.calls, self.capacity = source, calls, capacity
        total = source.capacity if source.capacity is not None else capacity
        driver = SimulatedDriver(capacity, addresses=addresses)
        self.model: CachingAllocator = CachingAllocator(settings, total, source.fraction, torch_version, driver)
        self.remembers: bool = self.model.tie == "address" and not self.model.collects
        """Whether equal blocks have equal futures: their age decides nothing."""
        self.effects: dict[tuple[str, int, tuple[int | None, ...]], _Effect] = {}
        self.remembered: int = 0
        """Bytes of the states of `effects`."""
        self.state: str | None = None
        """The state that the run is in, where that is known; `model` may be behind it."""
        self.is_behind: bool = False
        self.addresses: dict[int, int] = {}
        """The address of each block in use, by the number of its request."""
        self.refusal: Refusal | None = None
        self.passed = self.retries = self.driver_calls = self.peak_reserved = self.peak_allocated = 0

    def outcome(self) -> WhatIfOutcome:
        """Run the program and return the outcome."""
        for occurrence in self.calls.occurrences:
            if not (self._repeat(occurrence) if self.remembers and occurrence.stretch.times > 1 else self._play(occurrence)):
                break
        return WhatIfOutcome(
            peak_reserved=self.peak_reserved,
            peak_allocated=self.peak_allocated,
            refusal=self.refusal,
            passed=self.passed,
            retries=self.retries,
            driver_calls=self.driver_calls,
        )

    def _repeat(self, occurrence: Occurrence) -> bool:
        """Play an occurrence, or apply the effect that its calls had in this state before; return whether the run goes on."""
        if self.state is None:
            self.state = _state_of(self.model)
        key = (self.state, id(occurrence.stretch), tuple(map(self.addresses.get, occurrence.outer)))
        effect = self.effects.get(key)
        if effect is None:
            refusal, passed = self.refusal, self.passed
            if not self._play(occurrence):
                return False
            if self.refusal is refusal:
                self.state = _state_of(self.model)
                self._remember(key, self._effect(occurrence, self.passed - passed, self.state))
            return True
        for number in occurrence.outer:
            self.addresses.pop(number, None)
        first = occurrence.first
        for number, address in effect.blocks:
            self.addresses[first + number] = address
        self.state, self.is_behind = effect.state, True
        self.passed += effect.passed
        self._count(effect.peak_reserved, effect.peak_allocated, effect.retries, effect.driver_calls)
        return True

    def _remember(self, key: tuple[str, int, tuple[int | None, ...]], effect: _Effect) -> None:
        """Remember an effect, and forget the oldest ones beyond the limit."""
        self.effects[key] = effect
        self.remembered += len(effect.state)
        while self.remembered > _REMEMBERED:
            oldest = next(iter(self.effects))
            self.remembered -= len(self.effects.pop(oldest).state)

    def _effect(self, occurrence: Occurrence, passed: int, state: str) -> _Effect:
        """Return the effect of the occurrence that was just played."""
        assert isinstance(self.model.driver, SimulatedDriver)
        blocks = []
        for number, address in reversed(self.addresses.items()):
            if number < occurrence.first:
                break
            blocks.append((number - occurrence.first, address))
        return _Effect(
            state=state,
            blocks=tuple(reversed(blocks)),
            peak_reserved=self.model.peak_reserved,
            peak_allocated=self.model.peak_allocated,
            passed=passed,
            retries=self.model.num_alloc_retries,
            driver_calls=self.model.driver.calls,
        )

    def _count(self, peak_reserved: int, peak_allocated: int, retries: int, driver_calls: int) -> None:
        self.peak_reserved = max(self.peak_reserved, peak_reserved)
        self.peak_allocated = max(self.peak_allocated, peak_allocated)
        self.retries += retries
        self.driver_calls += driver_calls

    def _play(self, occurrence: Occurrence) -> bool:
        """Play the calls of an occurrence; return whether the run goes on. The model's counters are of these calls then."""
        if self.is_behind and self.state is not None:
            self.model = load(json.loads(self.state))
        model, driver = self.model, self.model.driver
        assert isinstance(driver, SimulatedDriver)
        self.state, self.is_behind = None, False
        model.peak_reserved, model.peak_allocated = model.reserved, model.allocated
        model.num_alloc_retries = driver.calls = 0
        goes_on = self._calls(occurrence)
        self._count(model.peak_reserved, model.peak_allocated, model.num_alloc_retries, driver.calls)
        return goes_on

    def _calls(self, occurrence: Occurrence) -> bool:
        model, addresses, places, outer = self.model, self.addresses, self.calls.places, occurrence.outer
        malloc, free, forget = model.malloc, model.free, model.events.clear
        first = number = occurrence.first
        for call, amount in zip(occurrence.stretch.calls, occurrence.stretch.amounts, strict=True):
            if call == FREE:
                address = addresses.pop(first + amount if amount >= 0 else outer[~amount], None)
                if address is not None:
                    free(address)
            elif call >= 0:
                stream, pool = places[call >> 1]
                try:
                    address = malloc(amount, stream, pool)
                except SimulatedOutOfMemoryError:
                    self.refusal = self.refusal or self._refusal(number, amount)
                    if not call & 1:
                        return False  # the recorded program went on from here; the reaction of this one is not known
                else:
                    if call & 1:
                        self.passed += 1
                        free(address)  # its further use is not recorded
                    else:
                        addresses[number] = address
                number += 1
            elif call == EMPTY_CACHE or self.capacity is None:
                model.empty_cache()
            forget()
        return True

    def _refusal(self, number: int, size: int) -> Refusal:
        """Return a refusal with the memory in use at that moment, by the line that requested it, largest first."""
        model, positions, stacks = self.model, self.calls.positions, self.source.trace.stacks
        by_stack: dict[int, list[int]] = {}
        for other, address in self.addresses.items():
            position = positions[other]
            stack = stacks[position] if stacks and position >= 0 else -1
            by_stack.setdefault(stack, []).append(model.live[address].size)
        holders = sorted(((stack, sum(sizes), len(sizes)) for stack, sizes in by_stack.items()), key=lambda holder: -holder[1])
        return Refusal(
            position=positions[number],
            number=number + 1,
            size=size,
            allocated=model.allocated,
            reserved=model.reserved,
            holders=tuple(holders[:5]),
        )


def _state_of(model: CachingAllocator) -> str:
    """Return all that the future of a model depends on."""
    state = save(model)
    state["counters"] = {name: value if name in _LEVELS else 0 for name, value in state["counters"].items()}
    state["driver"]["calls"] = 0
    return json.dumps(state)
