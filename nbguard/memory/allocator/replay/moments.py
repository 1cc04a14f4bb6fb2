"""The states of an allocator during a recorded trace, each as the snapshot that would have been taken after an event."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, SMALL_SEGMENT, PoolId, range_size, round_size
from nbguard.memory.allocator.replay.player import Player
from nbguard.memory.allocator.replay.replay import RecordedDevice, best_play, recorded_device
from nbguard.memory.allocator.replay.rollback import Intervals, Owner, page_owners
from nbguard.memory.allocator.replay.start import set_up
from nbguard.memory.allocator.snapshot.snapshot import Snapshot, SnapshotBlock, SnapshotSegment

_KEPT = 64
"""States that are kept along a trace, at least `_APART` events apart. Any other is at most one such stretch away."""
_APART = 4096

BEFORE = -1
"""Stands for the event that allocated a block where that is not in the trace."""


class _Use(NamedTuple):
    """A block in use."""

    size: int  # bytes
    requested: int  # bytes of the request
    origin: int  # position of the event that allocated it, or `BEFORE`
    is_pending: bool = False  # freed, and waiting for another stream


@dataclass(slots=True)
class _State:
    """The segments and blocks after a number of events."""

    segments: dict[int, tuple[int, Owner]] = field(default_factory=dict)  # classic ones: (bytes, owner) by address
    mapped: dict[Owner, Intervals] = field(default_factory=dict)  # stretches of expandable segments that have memory
    uses: dict[int, _Use] = field(default_factory=dict)  # blocks in use by address

    def copy(self) -> _State:
        return _State(self.segments.copy(), {owner: each.copy() for owner, each in self.mapped.items()}, self.uses.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMoment:
    """The state of one device after a number of events of its trace."""

    event: int  # events that had happened
    snapshot: Snapshot  # the segments and blocks then, with the stacks that allocated them; it has no trace
    kept: frozenset[int]  # addresses of blocks that are still the same ones at the end of the trace
    forgotten: frozenset[int]  # addresses of blocks from before the trace that were freed in it: nothing tells who made them
    unsure: frozenset[int]  # those of them whose size is at least, and up to 1 MiB above, the one given


class TraceMoments:
    """The states of one device during its trace. State 0 is the one before the first event, the last is the file's own.

    Segments, addresses and requests come from the recorded events. A block's bytes are the snapshot's where it was in
    use at the end, else those that the model of the allocator gives it when the trace is replayed.

    Raises:
        SnapshotError: trace and segments contradict each other, or the recorded settings are none that PyTorch takes.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.device = device
        self._snapshot = snapshot
        self.source = source = recorded_device(snapshot, device)
        player, self.replay = best_play(source)
        page = source.settings.large_segment
        self._owners = page_owners(source.segments, source.trace, page, range_size(source.capacity, page))
        self._sizes = player.sizes
        self._stacks_at_end = self._take_over_the_end()
        self._first, self._unsure = _start(source, player)
        self.allocated = array("q")  # bytes after each event; the first entry is before all of them
        self.reserved = array("q")  # likewise
        self._states: dict[int, _State] = {}  # some of them, by the number of events before
        self._walk_through()

    @property
    def events(self) -> int:
        """The number of events of the trace, and of its last state."""
        return len(self.source.trace.events)

    @property
    def left_before(self) -> int:
        """The number of blocks in use when the trace begins. Nothing of the time before is recorded."""
        return len(self._first.uses)

    @property
    def peak(self) -> int:
        """The first state with the most bytes allocated."""
        return self.allocated.index(max(self.allocated))

    @property
    def refused(self) -> int | None:
        """The state at the first request that found no memory; None without one."""
        return next((place + 1 for place, event in enumerate(self.source.trace.events) if event[0] == "oom"), None)

    def at(self, event: int) -> TraceMoment:
        """Return the state after `event` events, from 0 up to `events`."""
        near = event - event % self._apart
        state = self._states[near].copy()
        for place in range(near, event):
            self._do(state, place)
        end = self._last.uses
        kept = frozenset(
            at for at, use in state.uses.items() if (last := end.get(at)) is not None and last.origin == use.origin
        )
        forgotten = frozenset(at for at, use in state.uses.items() if use.origin == BEFORE) - kept
        snapshot = self._snapshot
        return TraceMoment(
            event=event,
            snapshot=replace(
                snapshot, segments=tuple(self._segments(state)), traces=(), sidecar=replace(snapshot.sidecar, frees=())
            ),
            kept=kept,
            forgotten=forgotten,
            unsure=forgotten & self._unsure,
        )

    # --- the way through the trace

    def _take_over_the_end(self) -> dict[int, int]:
        """Give the blocks at the end their own sizes; return the stacks of those that no event of the trace allocated."""
        last = {event[1]: place for place, event in enumerate(self.source.trace.events) if event[0] == "alloc"}
        stacks = {}
        for segment in self.source.segments:
            for block in segment.blocks:
                if block.state == "inactive":
                    continue
                if block.address in last:
                    self._sizes[last[block.address]] = block.size
                else:
                    stacks[block.address] = block.stack
        return stacks

    def _walk_through(self) -> None:
        """Go through the trace once, for the bytes after each event and some states on the way."""
        self._apart = max(_APART, self.events // _KEPT + 1)
        state = self._first.copy()
        allocated = sum(use.size for use in state.uses.values() if not use.is_pending)
        reserved = self.source.start.reserved
        self._states[0] = state.copy()
        self.allocated.append(allocated)
        self.reserved.append(reserved)
        for place, (action, address, size, _) in enumerate(self.source.trace.events):
            if action == "free_requested" and address in state.uses:
                allocated -= state.uses[address].size
            self._do(state, place)
            if action == "alloc":
                allocated += state.uses[address].size
            elif action in ("segment_alloc", "segment_map"):
                reserved += size
            elif action in ("segment_free", "segment_unmap"):
                reserved -= size
            self.allocated.append(allocated)
            self.reserved.append(reserved)
            if (place + 1) % self._apart == 0:
                self._states[place + 1] = state.copy()
        self._last = state

    def _do(self, state: _State, place: int) -> None:
        """Bring a state past one event."""
        action, address, size, stream = self.source.trace.events[place]
        match action:
            case "alloc":
                nbytes = self._sizes[place] or round_size(size, self.source.settings.divisions)
                state.uses[address] = _Use(nbytes, size, place)
            case "free_requested":
                if (use := state.uses.get(address)) is not None:
                    state.uses[address] = _Use(use.size, use.requested, use.origin, is_pending=True)
            case "free_completed":
                state.uses.pop(address, None)
            case "segment_alloc":
                state.segments[address] = (size, (self._pool(place), size <= SMALL_SEGMENT, stream))
            case "segment_free":
                state.segments.pop(address, None)
            case "segment_map":
                state.mapped.setdefault(self._owners[place], Intervals()).add(address, address + size)
            case "segment_unmap":
                state.mapped.setdefault(self._owners[place], Intervals()).remove(address, address + size)

    def _pool(self, place: int) -> PoolId:
        pools = self.source.trace.pools
        return self.source.start.pools.get(place, DEFAULT_POOL) if pools is None else pools[place]

    # --- a state as segments

    def _segments(self, state: _State) -> Iterator[SnapshotSegment]:
        """Yield the segments of a state by address, as a snapshot has them."""
        places = sorted(state.uses)
        stretches = [(address, address + size, owner, False) for address, (size, owner) in state.segments.items()]
        stretches += [(start, end, owner, True) for owner, each in state.mapped.items() for start, end in each]
        for start, end, (pool, is_small, stream), is_expandable in sorted(stretches):
            inside = places[bisect_left(places, start) : bisect_left(places, end)]
            yield SnapshotSegment(
                device=self.device,
                address=start,
                total_size=end - start,
                stream=stream,
                is_small=is_small,
                is_expandable=is_expandable,
                pool=pool,
                blocks=tuple(self._blocks(state, inside, start, end)),
            )

    def _blocks(self, state: _State, places: Sequence[int], start: int, end: int) -> Iterator[SnapshotBlock]:
        """Yield the blocks of one segment. A gap between two blocks in use is one free block, as free neighbours are joined."""
        at = start
        for place, following in pairwise([*places, end]):
            if place > at:
                yield SnapshotBlock(address=at, size=place - at, requested=0, state="inactive")
            use = state.uses[place]
            yield SnapshotBlock(
                address=place,
                size=min(use.size, following - place),
                requested=use.requested,
                state="active_pending_free" if use.is_pending else "active_allocated",
                stack=self._stack(place, use.origin),
            )
            at = min(place + use.size, following)
        if end > at:
            yield SnapshotBlock(address=at, size=end - at, requested=0, state="inactive")

    def _stack(self, address: int, origin: int) -> int:
        """Return the number of the stack that allocated a block; -1 where it is not recorded."""
        if origin == BEFORE:
            return self._stacks_at_end.get(address, -1)
        stacks = self.source.trace.stacks
        return stacks[origin] if stacks else -1


def _start(source: RecordedDevice, player: Player) -> tuple[_State, frozenset[int]]:
    """Return the state before the trace, and the addresses of blocks whose size there is an assumption."""
    model = CachingAllocator(source.settings, source.capacity, source.fraction, player.model.torch_version)
    assumptions = set_up(model, source.start, player.corrections)
    sizes = {block.address: block.size for block in (*model.live.values(), *model.pending)}
    uses = {at: _Use(sizes[at], block.requested, BEFORE, block.is_pending) for at, block in source.start.blocks.items()}
    start = _State(source.start.segments.copy(), {owner: each.copy() for owner, each in source.start.mapped.items()}, uses)
    return start, frozenset(assumptions.sizes.keys() - player.corrections.sizes.keys())
