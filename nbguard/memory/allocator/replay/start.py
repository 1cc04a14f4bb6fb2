"""Construction of a model in the state at the start of a trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nbguard.errors import SnapshotError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import COUNTER_SHIFT, LIVE, PENDING, UNMAPPED, FreeSet, ModelBlock, Range
from nbguard.memory.allocator.model.policy import SMALL_MAX, SMALL_SEGMENT, range_size, round_size
from nbguard.memory.allocator.replay.page_owners import Owner
from nbguard.memory.allocator.replay.rollback import InitialState, LiveBlock


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
