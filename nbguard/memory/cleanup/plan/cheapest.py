"""The cheapest set of holders whose release lets a request in one piece succeed, stale ones first, then the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from nbguard.memory.cleanup.plan.parking import block_holders_of, default_plan
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.advice import Advice, release_names, release_stale
from nbguard.memory.core.analysis import DeviceAnalysis
from nbguard.memory.core.facts import Facts, Segment, Target
from nbguard.memory.core.pinning import BlockHolders, Unit
from nbguard.memory.core.references.graph import nbytes_of
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.references.owner_sets import bits_of
from nbguard.memory.core.requests import SMALL_MAX, Room, rounded_to_blocks, segment_size

_EXACT_STEPS = 1_000_000
"""Sets of names times questions on each: up to so many, every set is tried."""
_NOBODYS = 1 << 4096
"""Stands for blocks that no release of names frees; above the bit of any candidate."""
_CANDIDATES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The cheapest release that lets a request in one piece succeed on a device. All sizes are bytes."""

    nbytes: int  # of the request
    names: tuple[str, ...] = ()  # names to release; empty if nothing needs to be done, stale memory is enough, or nothing helps
    and_stale: bool = False  # `%reset_gpu` without a name is run, too
    lost: int = 0  # bytes of the user's own that are freed
    gives_back: int = 0  # bytes that go back to the device
    is_exact: bool = True  # every set was tried, and none loses less; else a good one, found step by step
    enough: bool | None = True  # the request succeeds then; None if the device's free memory is unknown

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Return the lines that release them; none where nothing needs to be done or nothing helps."""
        if not self.enough:
            return ()
        stale = (release_stale(),) if self.and_stale else ()
        return (*stale, release_names(self.names)) if self.names else stale


def cheapest_release(device: DeviceAnalysis, nbytes: int) -> Release:
    """Return the cheapest way to a request of `nbytes` on the default stream of `device`."""
    facts, room = device.analysis.facts, device.room
    fits = room.fits(nbytes)
    if fits is not False:
        return Release(nbytes=nbytes, enough=fits)
    stale = device.analysis.once(default_plan)
    after = _after(facts, room, stale)
    if after.fits(nbytes):
        return Release(nbytes=nbytes, names=(), and_stale=True, gives_back=_back(room, after))
    for names, is_exact in _ways(device, nbytes):
        plan = plan_cleanup(facts, Request(targets=tuple(Target(text=name, root=name) for name in names)))
        for and_stale in (False, True):
            after = _after(facts, room, plan, *((stale,) if and_stale else ()))
            if after.fits(nbytes):
                lost = nbytes_of(facts.graph, plan.storages - stale.storages)
                return Release(
                    nbytes=nbytes, names=names, and_stale=and_stale, lost=lost, gives_back=_back(room, after), is_exact=is_exact
                )
    return Release(nbytes=nbytes, enough=False)


def _after(facts: Facts, room: Room, *plans: Plan) -> Room:
    """Return the room that requests have once `plans` have been carried out: every cleanup empties the cache."""
    freed = {
        storage.address
        for storage in (facts.graph.storages[number] for plan in plans for number in plan.storages)
        if storage.device == room.device.device
    }
    return replace(room, freed=freed, in_use=frozenset.intersection(*(plan.pools for plan in plans)), is_emptied=True)


def _back(before: Room, after: Room) -> int:
    """Return the additional bytes that can go back to the device."""
    return after.releasable() - before.releasable()


@dataclass(frozen=True, slots=True)
class _Hole:
    """A stretch of blocks in one segment that is large enough for a request, over sets of candidates, as bits.

    The cleanup that frees it gives a segment back where nothing is live any more; then the stretch is no longer there.
    """

    mask: int  # candidates that must go for the stretch to be free
    segment: int  # candidates that must go for the whole segment to be free

    def is_there(self, chosen: int) -> bool:
        return not self.mask & ~chosen and bool(self.segment & ~chosen)


@dataclass(frozen=True, slots=True)
class _Puzzle:
    """A request over sets of candidates, as bits: it succeeds if one of `holes` is there, or if enough bytes come back."""

    holes: frozenset[_Hole]
    back: dict[int, int]  # bytes that come back to the device once all candidates of a mask are gone
    losses: dict[int, int]  # bytes that the user loses with them
    missing: int  # bytes that must come back for a new segment

    def is_solved(self, chosen: int) -> bool:
        if any(hole.is_there(chosen) for hole in self.holes):
            return True
        return sum(nbytes for mask, nbytes in self.back.items() if not mask & ~chosen) >= self.missing

    def loss(self, chosen: int) -> int:
        return sum(nbytes for mask, nbytes in self.losses.items() if not mask & ~chosen)

    def cost(self, chosen: int) -> tuple[int, int]:
        return self.loss(chosen), chosen.bit_count()


def _ways(device: DeviceAnalysis, nbytes: int) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield names to release, the cheapest set first, and whether it is known to be the cheapest."""
    facts, room, held = device.analysis.facts, device.room, device.once(block_holders_of)
    rows = [row for row in held.holders if row.kind == "name"][:_CANDIDATES]
    bit_of_root = {root: 1 << number for number, row in enumerate(rows) for root in row.roots}
    masks = [0 if row.stale else _mask(row, bit_of_root) for row in held.holders]
    puzzle = _puzzle(room, device.units, held, masks, nbytes)
    relevant = reduce(or_, (*(hole.mask for hole in puzzle.holes), *puzzle.back), 0)
    count = relevant.bit_count()
    work = (1 << min(count, 40)) * (1 + len(puzzle.holes) + len(puzzle.back))
    is_exact = work <= _EXACT_STEPS and len(rows) < _CANDIDATES
    chosen = _every_set(puzzle, relevant) if is_exact else _step_by_step(puzzle, relevant)
    if chosen is not None:
        yield _names(facts, rows, chosen), is_exact
    if relevant and puzzle.is_solved(relevant):  # where the plan says that the cheapest is not enough
        yield _names(facts, rows, relevant), False


def _mask(row: Holder, bit_of_root: dict[int, int]) -> int:
    """Return the candidates that must go for the bytes of a holder to be free."""
    return sum({bit_of_root.get(root, _NOBODYS) for root in row.roots}) if row.roots else _NOBODYS


def _names(facts: Facts, rows: Sequence[Holder], chosen: int) -> tuple[str, ...]:
    """Return every name of the candidates in a set: an object with two names is free when both are gone."""
    return tuple(facts.graph.roots[root].label for number in bits_of(chosen) for root in rows[number].roots)


def _puzzle(room: Room, blocks: Iterable[Unit], held: BlockHolders, masks: Sequence[int], nbytes: int) -> _Puzzle:
    rounded = rounded_to_blocks(nbytes)
    small = rounded <= SMALL_MAX
    need = segment_size(rounded)
    back: dict[int, int] = {}
    for unit in blocks:
        held_blocks = [block for block in unit.live if block.state == "active_allocated"]
        mask = reduce(or_, (masks[held.place(block)] for block in held_blocks), 0)
        if held_blocks and not mask & _NOBODYS:  # where all wait for streams, emptying the cache gives it back anyway
            back[mask] = back.get(mask, 0) + unit.gives_back
    holes = {hole for segment in room.serving(small=small) for hole in _holes(segment, held, masks, rounded)}
    losses: dict[int, int] = {}
    for holder, mask in zip(held.holders, masks, strict=True):
        if holder.retained and not mask & _NOBODYS:
            losses[mask] = losses.get(mask, 0) + holder.retained
    return _Puzzle(frozenset(holes), back, losses, room.missing(need))


def _holes(segment: Segment, held: BlockHolders, masks: Sequence[int], rounded: int) -> Iterator[_Hole]:
    """Yield each shortest stretch of blocks that is large enough."""
    blocks = segment.blocks
    owners = [masks[held.place(block)] if block.state == "active_allocated" else 0 for block in blocks]
    whole = _NOBODYS if segment.is_expandable else reduce(or_, owners, 0)  # a page that goes back can be mapped again
    end = size = 0
    for start, block in enumerate(blocks):
        while size < rounded and end < len(blocks):
            size += blocks[end].size
            end += 1
        if size < rounded:
            return
        mask = reduce(or_, owners[start:end], 0)
        if not mask & _NOBODYS:
            yield _Hole(mask, whole)
        size -= block.size


def _every_set(puzzle: _Puzzle, relevant: int) -> int | None:
    """Return the cheapest set of candidates that is enough, by trying all."""
    best: int | None = None
    chosen = relevant
    while chosen:  # every subset of `relevant`, by the usual trick
        if (best is None or puzzle.cost(chosen) < puzzle.cost(best)) and puzzle.is_solved(chosen):
            best = chosen
        chosen = (chosen - 1) & relevant
    return best


def _step_by_step(puzzle: _Puzzle, relevant: int) -> int | None:
    """Return a good set: the best hole, or candidates taken in the order of bytes given per byte lost, then pruned."""
    good = [hole.mask for hole in puzzle.holes if puzzle.is_solved(hole.mask)]
    single = {1 << number: 0 for number in bits_of(relevant)}
    for mask, nbytes in puzzle.back.items():
        for number in bits_of(mask):
            single[1 << number] += nbytes // mask.bit_count()
    chosen = 0
    for bit in sorted(single, key=lambda bit: single[bit] / (1 + puzzle.loss(bit)), reverse=True):
        chosen |= bit
        if puzzle.is_solved(chosen):
            break
    for bit in sorted(single, key=puzzle.loss, reverse=True):
        if chosen & bit and puzzle.is_solved(chosen & ~bit):
            chosen &= ~bit
    good += [chosen] if puzzle.is_solved(chosen) else []
    return min(good, key=puzzle.cost, default=None)
