"""The search for the cheapest live blocks whose leaving lets a request in, each answer proved on the model of the allocator.

Pure: segments and blocks in, addresses out. A set of blocks is an answer if in the model they can be freed, the cache emptied,
the request made, and the blocks requested again, the largest first. Nothing is assumed. PyTorch then decides as the model does,
since only parts of segments are free when they come back, told apart by size and stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model import state
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import SimulatedDriver
from nbguard.memory.allocator.model.settings import AllocatorSettings, round_size, segment_size
from nbguard.memory.allocator.replay.rollback import InitialState, Intervals, LiveBlock
from nbguard.memory.allocator.replay.start import StartCorrections, set_up
from nbguard.memory.core.facts import Block, DeviceFacts, PoolId, Segment

_LIVE, _FREE = "active_allocated", "inactive"
_UNIT = 2 * 1024**2
_CELLS = 1_000_000
"""Cells of the table of the search, at most; they take some 0.2 s."""
_PROOFS, _BLOCKS = 80, 200_000
"""Sets that are proved at most, and blocks in all of them; each proof builds the model, some microseconds a block."""
_HOLES = 12
"""Holes that are tried, the cheapest first."""


def live_state(device: DeviceFacts) -> InitialState:
    """Return the segments and blocks of a device in the form of the model's start."""
    start = InitialState()
    for segment in device.segments or ():
        owner = segment.pool, segment.is_small, segment.stream
        if segment.is_expandable:
            start.mapped.setdefault(owner, Intervals()).add(segment.address, segment.address + segment.total_size)
        else:
            start.segments[segment.address] = segment.total_size, owner
        for block in segment.blocks:
            if block.state != _FREE:
                start.blocks[block.address] = LiveBlock(
                    block.address, block.requested or block.size, block.size, is_pending=block.state != _LIVE
                )
    return start


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request that a device may have room for once live blocks have moved."""

    device: DeviceFacts  # with segments and free bytes; none of them expandable
    nbytes: int  # of the request
    stream: int = 0  # address of the stream that it is made on
    movable: Collection[int] = ()  # addresses of the live blocks that may move
    in_use: Collection[PoolId] = ()  # private pools that keep their segments
    freed: Collection[int] = ()  # addresses of live blocks that are free then
    proofs: list[bool] = field(default_factory=list)  # outcomes so far

    @cached_property
    def settings(self) -> AllocatorSettings:
        """Return the settings of the allocator."""
        return AllocatorSettings.recorded(self.device.settings)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that everybody's pool has."""
        return tuple(segment for segment in self.device.segments or () if not segment.is_private)

    @cached_property
    def blocks(self) -> dict[int, tuple[Block, Segment]]:
        """Return the blocks that may move, by address, each with its segment."""
        return {
            block.address: (block, segment)
            for segment in self.segments
            for block in segment.blocks
            if block.state == _LIVE and block.address in self.movable and block.address not in self.freed
        }

    @cached_property
    def need(self) -> int:
        """Return the bytes that new memory for the request takes of the device."""
        return segment_size(round_size(self.nbytes, self.settings.divisions), self.settings.large_segment)

    def live(self, segment: Segment) -> list[Block]:
        """Return the blocks of a segment that stay after the device was waited for."""
        return [block for block in segment.blocks if block.state == _LIVE and block.address not in self.freed]

    @cached_property
    def at_hand(self) -> int:
        """Return the bytes that the device has for new segments once the cache is empty."""
        back = sum(segment.total_size for segment in self.segments if not self.live(segment))
        reserved = sum(segment.total_size for segment in self.device.segments or ())
        limit = self._limit
        free = (self.device.free or 0) + back
        return free if limit is None else min(free, limit - reserved + back)

    @property
    def _limit(self) -> int | None:
        limit, total = self.device.limit, self.device.total
        return limit if limit is not None and (total is None or limit < total) else None

    def in_return_order(self, addresses: Iterable[int]) -> tuple[int, ...]:
        """Return blocks in the order of their return, the largest first."""
        return tuple(sorted(addresses, key=lambda address: (-self.blocks[address][0].size, address)))

    @property
    def has_proofs_left(self) -> bool:
        """Say whether more sets may be proved."""
        return len(self.proofs) <= self.most_proofs

    @cached_property
    def most_proofs(self) -> int:
        """Return how many sets are proved at most."""
        blocks = sum(len(segment.blocks) for segment in self.device.segments or ())
        return max(12, min(_PROOFS, _BLOCKS // (blocks + 1)))

    # --- proof ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _saved(self) -> dict[str, object]:
        """Return the model of the device after it was waited for, as plain data."""
        reserved = sum(segment.total_size for segment in self.device.segments or ())
        driver = SimulatedDriver((self.device.free or 0) + reserved, used=reserved)
        model = CachingAllocator(self.settings, self.device.total, driver=driver)
        set_up(model, live_state(self.device), StartCorrections())
        for block in tuple(model.pending):
            model.complete_free(block)
        for pool in model.pools.keys() - {(0, 0)} - set(self.in_use):
            model.release_pool(pool)
        for address in model.live.keys() & set(self.freed):
            model.free(address)
        return state.save(model)

    def fits(self, addresses: Sequence[int]) -> bool:
        """Say whether the request succeeds and all come back, if these blocks leave and come back in this order."""
        model = state.load(self._saved)
        model.cap = self._limit
        model.apply(model.settings)
        for address in addresses:
            model.free(address)
        model.empty_cache()
        try:
            model.malloc(self.nbytes, self.stream)
            for address in addresses:
                block, segment = self.blocks[address]
                model.malloc(block.requested or block.size, segment.stream)
        except SimulatedOutOfMemoryError:
            self.proofs.append(False)
            return False
        self.proofs.append(True)
        return True


def cheapest_moves(question: Question) -> tuple[int, ...] | None:
    """Return the blocks to move, in the order of their return, no block if there is room already, or None if no set is known.

    They are the cheapest of the sets that are tried, in bytes that move. All that may move together is always tried.
    """
    if question.fits(()):
        return ()
    holes = _holes(question)
    hole = next((moves for moves in holes[:_HOLES] if question.fits(moves)), None)
    found = [] if hole is None else [hole]
    emptied = _first_that_fits(question, _emptied(question), None if hole is None else _nbytes(question, hole))
    found += [] if emptied is None else [emptied]
    if not found:
        everything = question.in_return_order(question.blocks)
        if not question.fits(everything):
            return None
        found = [everything]
    best = min(found, key=lambda moves: _nbytes(question, moves))
    return _without_the_needless(question, best)


def _nbytes(question: Question, addresses: Iterable[int]) -> int:
    return sum(question.blocks[address][0].size for address in addresses)


def _first_that_fits(question: Question, candidates: Sequence[tuple[int, ...]], below: int | None) -> tuple[int, ...] | None:
    """Return the first of the candidates, the cheapest first, that is proved.

    A candidate that empties more is more likely proved, so the search goes on by doubled steps, then between the last two.
    Where none of them is, the ones that it skipped are tried, from the end.
    """
    if below is not None:
        candidates = [moves for moves in candidates if _nbytes(question, moves) < below]
    failed, place, step = -1, 0, 1
    left_out = set(range(len(candidates)))
    while place < len(candidates):
        left_out.discard(place)
        if question.fits(candidates[place]):
            break
        failed, place, step = place, min(place + step, max(len(candidates) - 1, place + 1)), step * 2
    if place >= len(candidates):
        tried = (candidates[each] for each in sorted(left_out, reverse=True))
        return next((moves for moves in tried if question.has_proofs_left and question.fits(moves)), None)
    while place - failed > 1:
        middle = (failed + place) // 2
        if question.fits(candidates[middle]):
            place = middle
        else:
            failed = middle
    return candidates[place]


def _emptied(question: Question) -> list[tuple[int, ...]]:
    """Return sets of blocks that empty whole segments, by cost, the cheapest for each amount of memory that goes back.

    How much more than the request's need must go back, for the blocks themselves, depends on the holes that they find: the
    proof decides, and a set for more is tried next.
    """
    items = []
    for segment in question.segments:
        live = question.live(segment)
        if live and all(block.address in question.blocks for block in live):
            items.append((sum(block.size for block in live), segment.total_size, [block.address for block in live]))
    missing = question.need - question.at_hand
    if missing <= 0 or not items:
        return []
    items.sort(key=lambda item: (item[0] / item[1], item[0]))
    most = min(sum(size for _, size, _ in items), 2 * missing + 64 * _UNIT)
    unit = _UNIT * max(1, -(-len(items) * (most // _UNIT + 1) // _CELLS))
    return _by_table(question, items, range(-(-missing // unit), most // unit + 1), unit)


def _by_table(
    question: Question, items: Sequence[tuple[int, int, list[int]]], amounts: range, unit: int
) -> list[tuple[int, ...]]:
    """Return the cheapest sets for amounts of memory in units, as items of (cost, bytes, addresses): a knapsack's table."""
    top = amounts.stop
    costs: list[float] = [0, *[float("inf")] * (top - 1)]
    taken: list[list[int]] = []  # per item, the amounts that it made cheaper
    for cost, size, _ in items:
        gain, better = size // unit, []
        for amount in range(top - 1, 0, -1):
            new = costs[max(0, amount - gain)] + cost
            if new < costs[amount]:
                costs[amount] = new
                better.append(amount)
        taken.append(better)
    sets = [frozenset(better) for better in taken]
    found: list[tuple[int, ...]] = []
    for amount in amounts:
        if costs[amount] == float("inf") or (found and costs[amount] == costs[amount - 1] and amount > amounts.start):
            continue
        left, chosen = amount, []
        for number in range(len(items) - 1, -1, -1):
            if left > 0 and left in sets[number]:
                chosen += items[number][2]
                left -= items[number][1] // unit
        found.append(question.in_return_order(chosen))
    return found


def _holes(question: Question) -> list[tuple[int, ...]]:
    """Return sets of neighbours in one segment that leave a hole for the request when they go, the cheapest first."""
    rounded = round_size(question.nbytes, question.settings.divisions)
    is_small = rounded <= 1024**2
    sets = []
    for segment in question.segments:
        if (segment.stream, segment.is_small) == (question.stream, is_small) and segment.total_size >= rounded:
            sets += [question.in_return_order(window) for window in _windows(question, segment, rounded)]
    return sorted({window for window in sets if window}, key=lambda moves: _nbytes(question, moves))


def _windows(question: Question, segment: Segment, rounded: int) -> Iterator[list[int]]:
    """Yield the movable blocks in each shortest stretch of a segment that is large enough and has no other live ones."""
    live = {block.address for block in question.live(segment)}
    stretch, size = deque[Block](), 0
    for block in segment.blocks:
        if block.address in live and block.address not in question.blocks:
            stretch, size = deque(), 0
            continue
        stretch.append(block)
        size += block.size
        while size - stretch[0].size >= rounded:
            size -= stretch.popleft().size
        if size >= rounded:
            yield [each.address for each in stretch if each.address in question.blocks]


def _without_the_needless(question: Question, moves: tuple[int, ...]) -> tuple[int, ...]:
    """Return the moves without those that are not needed, segment by segment, the dearest first."""
    by_segment: dict[int, list[int]] = {}
    for address in moves:
        by_segment.setdefault(question.blocks[address][1].address, []).append(address)
    for group in sorted(by_segment.values(), key=lambda group: -_nbytes(question, group)):
        if len(question.proofs) > 2 * question.most_proofs:
            break
        fewer = tuple(address for address in moves if address not in group)
        if fewer and question.fits(fewer):
            moves = fewer
    return moves
