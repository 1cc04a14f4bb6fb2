"""One pass over a trace, with the recorded requests and driver's answers, and with the model's decisions."""

from __future__ import annotations

from array import array
from itertools import groupby

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, PoolId
from nbguard.memory.allocator.replay.repair import (
    TraceDriver,
    finds,
    follow_cut,
    follow_growth,
    follow_releases,
    follow_request,
    is_retry,
    learn,
    learn_refusals,
    place_range,
    pool_around,
    private_pools_of,
    undo,
)
from nbguard.memory.allocator.replay.rollback import InitialState
from nbguard.memory.allocator.replay.start import StartCorrections, learn_partial_release, learn_releases, set_up
from nbguard.memory.allocator.snapshot.snapshot import Event, Trace

_MEMORY = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})
_RELEASES = frozenset({"segment_free", "segment_unmap"})


class Player:
    """One pass over a trace, with a fresh model in the state at the start of the trace."""

    def __init__(self, model: CachingAllocator, trace: Trace, start: InitialState, corrections: StartCorrections) -> None:
        self.model = model  # after `play` in the final state
        self.trace, self.start, self.corrections = trace, start, corrections
        self.events: tuple[Event, ...] = tuple(trace.events)
        self.assumptions = set_up(model, start, corrections)
        self.driver = model.driver = TraceDriver(self.events, model.events)
        self.learnt: int = 0  # changes made to `corrections` during this pass
        self.differences: list[int] = []  # positions of the recorded events that the model did not reproduce, in order
        self.first: Event | None = None  # the model's event at the first of them; None for none
        self.sizes = array("q", bytes(8 * len(self.events)))  # of each alloc event, its block's bytes; 0: unknown
        self._is_private = trace.pools is not None or any(
            pool != DEFAULT_POOL for pool in (*start.pools.values(), *model.pools)
        )

    def play(self) -> None:
        """Play every event."""
        events, driver, clear = self.events, self.driver, self.model.events.clear
        position, count = self._cut_off(), len(events)
        while position < count:
            clear()
            driver.position = position
            action = events[position][0]
            if action == "alloc":
                position = self._request(position, position)
            elif action == "free_requested":
                position = self._free(position)
            elif action in _MEMORY or action == "oom":
                position = self._memory(position)
            elif action == "free_completed":
                position = self._complete(position)
            else:
                position = self._snapshot(position)
        clear()

    def _cut_off(self) -> int:
        """Follow a request that the start of the trace cuts in two; return the position to go on from."""
        events = self.events
        end = next((index for index, event in enumerate(events) if event[0] not in _MEMORY), len(events))
        if end == len(events) or events[end][0] not in ("alloc", "oom"):
            return 0
        pool = self._pool(0, end) if self._is_private else DEFAULT_POOL
        if not follow_cut(self.model, events[: end + 1], pool):
            return 0
        self._note_size(end, events[end][1])
        return end + 1

    # --- requests ---------------------------------------------------------------------------------------------------------

    def _request(self, position: int, request: int) -> int:
        """Play a request: its own event is at `request`, the driver's events for it begin at `position`."""
        model = self.model
        out = model.events
        action, address, size, stream = self.events[request]
        peaks = model.peak_allocated, model.peak_reserved
        pool = self._pool(position, request) if self._is_private else DEFAULT_POOL
        if position < request:
            place_range(model, self.driver, self.events[position : request + 1], pool)
        try:
            got = model.malloc(size, stream, pool)
        except SimulatedOutOfMemoryError:
            got = -1
        if not (got == address and len(out) == 1 and request == position) and tuple(out) != self.events[position : request + 1]:
            self._otherwise(position, request, got, peaks, pool)
        if action == "alloc":
            self._note_size(request, address)
        return request + 1

    def _note_size(self, request: int, address: int) -> None:
        block = self.model.live.get(address)
        if block is not None:
            self.sizes[request] = block.size

    def _otherwise(self, position: int, request: int, got: int, peaks: tuple[int, int], pool: PoolId) -> None:
        """Learn from a request that the model served otherwise than the recorded allocator, or make the model follow."""
        model, expected = self.model, self.events[position : request + 1]
        mine = list(model.events)
        action, address, size, stream = expected[-1]
        if model.tie != "address":
            self.learnt += learn_partial_release(model, self.assumptions, self.corrections, mine, expected)
        if got >= 0 and (got != address or action == "oom"):
            chosen = undo(model, got, peaks)
            if len(expected) == len(mine) == 1 and action == "alloc":
                if learn(model, self.assumptions, self.corrections, chosen, address, expected[-1], pool):
                    self.learnt += 1
                    model.events.clear()
                    got = model.malloc(size, stream, pool)
                    if tuple(model.events) == expected:
                        return
                    undo(model, got, peaks)
                    got = -1
            elif ("segment_alloc", chosen.address, chosen.size, stream) in set(mine).difference(expected):
                model.release_segment(chosen)
        if got != address or action == "oom":
            follow_request(model, expected, pool)
        self._compare(position, request + 1, mine)

    def _free(self, position: int) -> int:
        events, model = self.events, self.model
        event = events[position]
        address = event[1]
        following = events[position + 1 : position + 2]
        is_at_once = bool(following) and following[0][0] == "free_completed" and following[0][1] == address
        block = model.live.get(address)
        if block is None:
            self._compare(position, position + 1 + is_at_once, [])
            return position + 1 + is_at_once
        if self.assumptions.sizes:
            self.assumptions.sizes.pop(address, None)
        if is_at_once:
            model.free(address)
            if model.events[0] != event or model.events[1] != following[0]:
                self._compare(position, position + 2, model.events)
            return position + 2
        block.streams = {-1}
        model.free(address)
        model.waiting.clear()  # the trace says when it becomes free
        self._compare(position, position + 1, model.events)
        return position + 1

    def _complete(self, position: int) -> int:
        address = self.events[position][1]
        block = next((block for block in self.model.pending if block.address == address), None)
        if block is not None:
            self.model.complete_free(block)
        self._compare(position, position + 1, self.model.events)
        return position + 1

    def _snapshot(self, position: int) -> int:
        _, address, _, stream = self.events[position]
        self._compare(position, position + 1, [("snapshot", address, self.model.active, stream)])
        return position + 1

    # --- the driver -------------------------------------------------------------------------------------------------------

    def _memory(self, position: int) -> int:
        """Play events of the driver: for the request that follows them, or for none (`empty_cache`)."""
        events, model = self.events, self.model
        end = released = position
        while end < len(events) and events[end][0] in _MEMORY:
            end += 1
        while released < end and events[released][0] in _RELEASES:
            released += 1
        is_request = end < len(events) and events[end][0] in ("alloc", "oom")
        pool = self._pool(position, end) if is_request and self._is_private else DEFAULT_POOL
        if is_request and self.assumptions.sizes and self._is_from_driver(end):
            self.learnt += learn_refusals(model, self.assumptions, self.corrections, events[end], pool)
        # A request that finds a free block takes it, and gives nothing back.
        may_be_partial = (
            is_request and (model.max_split is not None or model.collects) and finds(model, events[end], pool) is None
        )
        request = events[position : end + 1]
        if released > position and not (is_request and is_retry(model, request, released - position, pool)):
            run = list(events[position:released])
            for candidate in self._pools_of(run):
                if self._releases(candidate, run):
                    model.empty_cache(candidate)
                    return released
        if is_request and (released == position or may_be_partial):
            return self._request(position, end)
        if released > position:
            self._compare(position, released, model.would_release())
            follow_releases(model, events[position:released])
            return released
        self._compare(position, end, [])
        for is_release, indices in groupby(range(position, end), lambda index: events[index][0] in _RELEASES):
            group = tuple(indices)
            if is_release:
                follow_releases(model, events[group[0] : group[-1] + 1])
                continue
            for place in group:
                follow_growth(model, events[place], self.start.pools.get(place, DEFAULT_POOL))
        return end

    def _releases(self, pool: PoolId, run: list[Event]) -> bool:
        """Return whether emptying the cache causes the recorded events, after learning an order that was unknown."""
        events = self.model.would_release(pool)
        if events != run and self.model.tie != "address" and _differ_in_place_only(events, run):
            self.learnt += learn_releases(self.model, self.assumptions, self.corrections, run)
            events = self.model.would_release(pool)
        return events == run

    def _is_from_driver(self, request: int) -> bool:
        """Return whether a request got a new segment or none at all: then no free block was large enough."""
        action, address, _, _ = self.events[request]
        return action == "oom" or self.events[request - 1][:2] == ("segment_alloc", address)

    def _compare(self, position: int, end: int, mine: list[Event]) -> None:
        """Note the recorded events from `position` to `end` that the model did not reproduce in their place."""
        for index in range(position, end):
            event = mine[index - position] if index - position < len(mine) else None
            if event != self.events[index]:
                if not self.differences:
                    self.first = event
                self.differences.append(index)
        if len(mine) > end - position and (not self.differences or self.differences[-1] < position):
            self.first = self.first if self.differences else mine[end - position]
            self.differences.append(end - 1)

    def _pools_of(self, run: list[Event]) -> list[PoolId]:
        """Return whose caches a run of releases may have emptied."""
        return [DEFAULT_POOL, *(private_pools_of(self.model, run) if self._is_private else ())]

    def _pool(self, position: int, request: int) -> PoolId:
        """Return the pool of a request; before torch 2.12 only its segment tells."""
        if self.trace.pools is not None:
            return self.trace.pools[request]
        for index in range(position, request):
            if index in self.start.pools:
                return self.start.pools[index]
        return pool_around(self.model, self.events[request][1])


def _differ_in_place_only(events: list[Event], run: list[Event]) -> bool:
    """Return whether two runs of releases are equal, but for the order of segments of one size and stream."""
    first, second = ([event[2:] for event in releases if event[0] == "segment_free"] for releases in (events, run))
    return first == second and sorted(events) == sorted(run)
