"""Inference of the order of blocks from before a trace, from the choices that the trace shows.

Since torch 2.12 a counter decides which of two free blocks of one size is taken, and a snapshot does not hold it. But
each choice between blocks from before the trace shows which of them came first, and so does the order of releases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise

from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import FREE, ModelBlock
from nbguard.memory.allocator.model.policy import round_size
from nbguard.memory.allocator.replay.start import StartAssumptions, StartCorrections
from nbguard.memory.allocator.snapshot.events import Event


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
