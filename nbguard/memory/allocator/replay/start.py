"""Construction of a model in the state at the start of a trace, with the order of its blocks inferred."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import COUNTER_SHIFT, FREE, LIVE, PENDING, UNMAPPED, FreeSet, ModelBlock, Range
from nbguard.memory.allocator.model.settings import SMALL_MAX, SMALL_SEGMENT, range_size, round_size
from nbguard.memory.allocator.replay.rollback import InitialState, LiveBlock, Owner
from nbguard.memory.allocator.snapshot.snapshot import Event


@dataclass(slots=True)
class StartCorrections:
    """Facts on the state at the start that a trace showed and the snapshot lacks. Keys are addresses at the start."""

    sizes: dict[int, int] = field(default_factory=dict)  # bytes of blocks with only the request known
    before: set[tuple[int, int]] = field(default_factory=set)  # (older, younger) segments; blocks, where blocks are counted
    ranks: dict[int, int] = field(default_factory=dict)  # ranks of segments, or blocks, that agree with `before`

    def __len__(self) -> int:
        return len(self.sizes) + len(self.before)


@dataclass(slots=True)
class StartAssumptions:
    """Assumptions on the state at the start that the trace may prove wrong."""

    sizes: dict[int, ModelBlock] = field(default_factory=dict)  # blocks that may be larger, by address
    ranks: dict[int, int] = field(default_factory=dict)  # address of the segment, or block, that was given a rank


def set_up(allocator: CachingAllocator, start: InitialState, corrections: StartCorrections) -> StartAssumptions:
    """Put an empty model into the state `start`; return the assumptions that this took.

    Raises:
        SnapshotError: blocks in use lie outside of every segment, or overlap.
    """
    builder = _Builder(allocator, start, corrections)
    for address in sorted(start.segments):
        size, owner = start.segments[address]
        builder.classic(address, size, owner)
    for owner in sorted(start.mapped):
        for base, size, stretches in _ranges(allocator, owner, start):
            builder.expandable(base, size, stretches, owner)
    if builder.left:
        raise SnapshotError(f"trace and segments contradict each other: the block at {min(builder.left)} lies in no segment.")
    allocator.peak_allocated = allocator.allocated
    allocator.peak_reserved = allocator.reserved = start.reserved
    allocator.num_frees = 0
    return builder.assumptions


def _ranges(allocator: CachingAllocator, owner: Owner, start: InitialState) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield (base, size, mapped stretches) of each range of an owner: pages further apart than a range is long are of two."""
    page = SMALL_SEGMENT if owner[1] else allocator.settings.large_segment
    size = range_size(allocator.capacity, page)
    stretches = list(start.mapped[owner])
    bases: list[int] = []
    for address in sorted({*start.ever_mapped.get(owner, ()), *(first for first, _ in stretches)}):
        if not bases or address >= bases[-1] + size:
            bases.append(address)
    for number, base in enumerate(bases):
        above = bases[number + 1] if number + 1 < len(bases) else base + size
        inside = [(first, last) for first, last in stretches if base <= first < base + size]
        if inside:
            end = max(last for _, last in inside)
            yield base, max(min(size, above - base), end - base), inside


class _Builder:
    def __init__(self, allocator: CachingAllocator, start: InitialState, corrections: StartCorrections) -> None:
        self.allocator = allocator
        self.corrections = corrections
        self.by_block = allocator.tie == "block"
        self.left = dict(start.blocks)
        self.order = sorted(start.blocks)
        self.assumptions = StartAssumptions()

    def classic(self, address: int, size: int, owner: Owner) -> None:
        """Build a segment with its blocks."""
        free = self._set(owner)
        free.pool.owner.segments += 1
        rank = 0 if self.by_block else self._rank(address)
        self._chain(free, None, rank, address, [(address, address + size)], address + size)

    def expandable(self, base: int, size: int, stretches: list[tuple[int, int]], owner: Owner) -> None:
        """Build a range with its blocks, and unmapped ones where it has no memory."""
        free = self._set(owner)
        rank = 0 if self.by_block else self._rank(base)
        page = SMALL_SEGMENT if owner[1] else self.allocator.settings.large_segment
        space = Range(base, size, page, rank >> COUNTER_SHIFT)
        free.pool.owner.segments += len(stretches)
        self._chain(free, space, rank, base, stretches, base + size)

    def _set(self, owner: Owner) -> FreeSet:
        pool_id, is_small, stream = owner
        pool = self.allocator.pools.get(pool_id) or self.allocator.create_pool(pool_id)
        return (pool.small if is_small else pool.large).of(stream)

    def _rank(self, address: int) -> int:
        rank = self.allocator.next_rank()
        rank = self.corrections.ranks.get(address, rank)
        self.assumptions.ranks[rank] = address
        return rank

    def _chain(
        self, free: FreeSet, space: Range | None, rank: int, begin: int, stretches: list[tuple[int, int]], end: int
    ) -> None:
        """Link up live, free and unmapped blocks from `begin` to `end`."""
        last: ModelBlock | None = None
        position = begin

        def put(size: int, state: int | None) -> ModelBlock:
            nonlocal last, position
            block = ModelBlock(position, size, free, space, self._rank(position) if self.by_block else rank, LIVE)
            if last is not None:
                block.put_after(last)
            if state == UNMAPPED:
                free.add_unmapped(block)
            elif state is None:
                free.add(block)
            last = block
            position += size
            return block

        for first, limit in stretches:
            if first > position:
                put(first - position, UNMAPPED)
            for live, size, is_guess in self._blocks(free, space, first, limit):
                if live.address > position:
                    put(live.address - position, None)
                self._use(put(size, LIVE), live, is_guess=is_guess)
            if limit > position:
                put(limit - position, None)
        if end > position:
            put(end - position, UNMAPPED)

    def _use(self, block: ModelBlock, live: LiveBlock, *, is_guess: bool) -> None:
        allocator = self.allocator
        block.requested = live.requested
        allocator.requested += live.requested
        if live.is_pending:
            block.state = PENDING
            allocator.pending.append(block)
            allocator.pending_bytes += block.size
        else:
            allocator.live[block.address] = block
            allocator.allocated += block.size
            allocator.num_allocs += 1
        if is_guess:
            self.assumptions.sizes[block.address] = block

    def _blocks(self, free: FreeSet, space: Range | None, first: int, limit: int) -> Iterable[tuple[LiveBlock, int, bool]]:
        """Yield (block in use, its size, whether that is a guess) within a stretch that has memory."""
        places = self.order[bisect_left(self.order, first) : bisect_left(self.order, limit)]
        if any(address not in self.left for address in places):
            raise SnapshotError(f"trace and segments contradict each other: two segments have the block at {places[0]}.")
        inside = [self.left.pop(address) for address in places]
        for number, live in enumerate(inside):
            follower = inside[number + 1].address if number + 1 < len(inside) else limit
            size, is_guess = self._size(
                live, follower - live.address, is_classic_large=space is None and not free.pool.is_small
            )
            if size > follower - live.address:
                raise SnapshotError(f"trace and segments contradict each other: the block at {live.address} overlaps the next.")
            yield live, size, is_guess

    def _size(self, live: LiveBlock, room: int, *, is_classic_large: bool) -> tuple[int, bool]:
        """Return the size of a block, and whether it may be larger, by a rest of up to 1 MiB that was not split off."""
        if live.size is not None:
            return live.size, False
        if live.address in self.corrections.sizes:
            return self.corrections.sizes[live.address], True
        settings = self.allocator.settings
        rounded = round_size(live.requested, settings.divisions)
        if not is_classic_large:
            return rounded, False
        is_whole = settings.max_split_size is not None and rounded >= settings.max_split_size
        return (room, False) if is_whole or room - rounded <= SMALL_MAX else (rounded, True)


# --- Inference of the order of blocks from before a trace, from the choices that the trace shows.
#
# Since torch 2.12 a counter decides which of two free blocks of one size is taken, and a snapshot does not hold it. But each
# choice between blocks from before the trace shows which of them came first, and so does the order of releases.


def prefer(model: CachingAllocator, assumptions: StartAssumptions, corrections: StartCorrections, wanted: ModelBlock) -> bool:
    """Note that `wanted` comes before all free blocks of its size, and reorder them; return whether that is possible."""
    free = wanted.home
    rivals = [block for block in free.blocks if block.size == wanted.size and block.rank < wanted.rank]
    ranks = sorted({block.rank for block in rivals})
    known = assumptions.ranks
    if not ranks or wanted.rank not in known or any(rank not in known for rank in ranks):
        return False
    corrections.before |= {(known[wanted.rank], known[rank]) for rank in ranks}
    _assign(model, assumptions, [wanted.rank, *ranks])
    return True


def learn_releases(
    model: CachingAllocator, assumptions: StartAssumptions, corrections: StartCorrections, run: list[Event]
) -> bool:
    """Note the order of return of free blocks of one size, and reorder them; return whether it was another order."""
    free = [block for block in model.blocks() if block.state == FREE]
    places = [block.address for block in free]
    by_size: dict[tuple[int, int], dict[int, None]] = {}
    for _, address, _, _ in run:
        block = free[bisect_right(places, address) - 1]
        if block.rank in assumptions.ranks:
            by_size.setdefault((id(block.home), block.size), {})[block.rank] = None
    learnt = False
    for ranks in map(list, by_size.values()):
        if ranks != sorted(ranks):
            addresses = [assumptions.ranks[rank] for rank in ranks]
            corrections.before |= set(pairwise(addresses))
            _assign(model, assumptions, ranks)
            learnt = True
    return learnt


def learn_partial_release(
    model: CachingAllocator,
    assumptions: StartAssumptions,
    corrections: StartCorrections,
    mine: list[Event],
    request: tuple[Event, ...],
) -> bool:
    """Note the order of two segments of one size where the model gave back the other one; return whether that was so.

    Among segments large enough for a request the first goes back; among smaller ones above the split limit, the last.

    Args:
        model: with the settings of the request.
        assumptions: on the state at the start.
        corrections: receives the order, for the next pass from the start.
        mine: the model's events for the request.
        request: the recorded events, the request's own last.
    """
    pair = next((pair for pair in zip(mine, request, strict=False) if pair[0] != pair[1]), None)
    if pair is None or model.max_split is None or model.collects:
        return False
    released, recorded = pair
    if released[0] != "segment_free" or (released[0], *released[2:]) != (recorded[0], *recorded[2:]):
        return False
    if not {released[1], recorded[1]} <= set(assumptions.ranks.values()):
        return False
    rounded, size = round_size(request[-1][2], model.settings.divisions), recorded[2]
    from_the_end = model.max_split <= size < rounded and recorded[3] == request[-1][3]
    first, second = (released, recorded) if from_the_end else (recorded, released)
    corrections.before.add((first[1], second[1]))
    return True


def _assign(model: CachingAllocator, assumptions: StartAssumptions, ranks: list[int]) -> None:
    """Give the blocks that have `ranks` the same ranks in rising order."""
    new = dict(zip(ranks, sorted(ranks), strict=True))
    blocks = [block for block in model.blocks() if block.rank in new]
    free = [block for block in blocks if block.state == FREE]
    for block in free:
        block.home.remove(block)
    for block in blocks:
        block.rank = new[block.rank]
    for block in free:
        born = block.born
        block.home.add(block)
        block.born = born
    assumptions.ranks |= {new[rank]: address for rank, address in {rank: assumptions.ranks[rank] for rank in ranks}.items()}


def settle(assumptions: StartAssumptions, corrections: StartCorrections) -> None:
    """Set ranks for the next pass that agree with all corrections and are otherwise as they were, as far as possible."""
    if not corrections.before:
        return
    ranks = sorted(assumptions.ranks)
    place = {assumptions.ranks[rank]: index for index, rank in enumerate(ranks)}
    corrections.ranks = dict(zip(_in_order(place, corrections.before), ranks, strict=False))


def _in_order(place: dict[int, int], before: Iterable[tuple[int, int]]) -> list[int]:
    """Return addresses so that each pair of `before` is in order; where that leaves a choice, by their place so far."""
    later: dict[int, list[int]] = {}
    waits = dict.fromkeys(place, 0)
    for first, second in before:
        if first in waits and second in waits:
            later.setdefault(first, []).append(second)
            waits[second] += 1
    ready = [(place[address], address) for address, count in waits.items() if not count]
    heapify(ready)
    order = []
    while ready:
        _, address = heappop(ready)
        order.append(address)
        for follower in later.get(address, ()):
            waits[follower] -= 1
            if not waits[follower]:
                heappush(ready, (place[follower], follower))
    done = set(order)
    return order + sorted((address for address in place if address not in done), key=place.__getitem__)
