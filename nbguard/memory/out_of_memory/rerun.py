"""The verdict on a rerun of the cell after something was freed: does it get as far as before, or is that unknown?

The bytes that a cell takes are bounded, never guessed (docs/adr/0015).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from nbguard.memory.cleanup.plan.parking import default_plan
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.facts import Facts, PoolId, Root
from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.core.oom_facts import EarlierFailure, OomFact
from nbguard.memory.core.references.graph import reach_of_roots, storages_of
from nbguard.memory.core.requests import segment_size
from nbguard.memory.out_of_memory.failed_request import FailedRequest

_LAST_ERROR = "last error"
_UNTOUCHED = ("name", "out")
_HELD_BY_NOBODY = ("garbage", "cache")
_MOST_WASTED = 19 * 1024**2
"""Bytes that one request can leave unused at most in the segment made for it."""


class RerunVerdict(str, Enum):
    """The effect of an advice, in JSON and on the wire."""

    RERUN = "rerun"  # the cell, run again from its first line, runs through
    FURTHER = "further"  # it comes past the request that failed; whether its later allocations have room is unknown
    REQUEST = "request"  # there is room for the request; whether for all that the cell takes before it is not known
    UNKNOWN = "unknown"  # it may help: the free memory, or the request, is unknown
    SHORT = "short"  # the request would fail again
    NEVER = "never"  # the device is too small for the cell's memory and the request, whatever is freed

    __str__ = str.__str__
    __repr__ = str.__repr__

    @property
    def is_enough(self) -> bool | None:
        """Return True where the cell runs through, False where it fails again, None where either may be."""
        return {RerunVerdict.RERUN: True, RerunVerdict.SHORT: False, RerunVerdict.NEVER: False}.get(self)


VERDICT_TEXTS: dict[RerunVerdict, str] = {
    RerunVerdict.RERUN: "enough: the cell gets past the line that failed",
    RerunVerdict.FURTHER: "may be enough: the cell gets past the line that failed, but later code may need more",
    RerunVerdict.REQUEST: "lets this request through",
    RerunVerdict.UNKNOWN: "may be enough",
    RerunVerdict.SHORT: "not enough alone",
    RerunVerdict.NEVER: "cannot fit on this device",
}
"""Each verdict in the words for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """The device after something was freed."""

    freed: frozenset[int]  # numbers of the storages that are free then
    pools: Collection[PoolId] | None = None  # private pools that are kept then; None for the present ones
    is_emptied: bool = False  # the cache was emptied, as every cleanup does
    is_limited: bool = True  # the memory fraction counts
    more: int = 0  # bytes that are free on the device besides


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """The run that failed, as its next run will need the memory."""

    request: FailedRequest  # that failed
    own: frozenset[int]  # numbers of the storages that only its frames, and the names that it has bound, hold
    own_bytes: int  # of them, where the request was made
    since: int | None  # bytes freed between the failure and now; None where unknown
    kept: frozenset[int]  # numbers of the storages that were there before the cell, and that its code cannot reach

    @classmethod
    def of(cls, request: FailedRequest) -> Rerun:
        """Return the run of `request`: its error alone holds the bytes that the default cleanup frees there."""
        facts, oom = request.facts, request.oom
        without = plan_cleanup(_without_learners(facts), Request(keep=(_LAST_ERROR,)))
        own = (request.analysis.once(default_plan).storages - without.storages) | _bound_by_the_run(facts, oom)
        since = None if oom.was_released else 0
        stats = None if request.device is None else request.device.facts.allocator
        if oom.note is not None and stats is not None:
            since = max(0, oom.note.allocated + oom.note.slack - stats.allocated)
        return cls(
            request=request,
            own=frozenset(own),
            own_bytes=request.nbytes_here(own),
            since=since,
            kept=_kept(facts, oom),
        )

    # --- what the cell takes ----------------------------------------------------------------------------------------------

    @cached_property
    def allocated(self) -> int:
        """Return the bytes that are allocated now where the request was made."""
        device = self.request.device
        if device is not None and device.facts.allocator is not None:
            return device.facts.allocator.allocated
        return self.request.nbytes_here(range(len(self.request.facts.graph.storages)))

    @cached_property
    def taken(self) -> int:
        """Return the bytes that the cell itself had allocated at the failure, at least."""
        start, note = self.request.oom.start, self.request.oom.note
        if start is not None and note is not None:
            return max(0, note.allocated - start.allocated)
        return self.own_bytes

    @cached_property
    def is_taken_exact(self) -> bool:
        """Say whether `taken` is by the counters at the beginning of the cell and at the failure."""
        return self.request.oom.start is not None and self.request.oom.note is not None

    @property
    def is_first_request(self) -> bool:
        """Say whether the cell is known to have asked for nothing before the request that failed."""
        start, counts = self.request.oom.start, None if self.request.oom.note is None else self.request.oom.note.counts
        has_more = bool(self.further or self._elements_left)
        return start is not None and counts is not None and counts.made == start.made and not has_more

    @cached_property
    def needed(self) -> int:
        """Return the bytes of `taken` that the next run needs at the same time: not unreachable ones, which may go earlier."""
        graph = self.request.facts.graph
        held = (n for n, root in enumerate(graph.roots) if root.kind != "garbage")
        garbage = set(range(len(graph.storages))) - storages_of(graph, reach_of_roots(graph, held))
        return max(0, self.taken - self.request.nbytes_here(garbage))

    def _kept_bytes(self, freed: Set[int] = frozenset()) -> int:
        return self.request.nbytes_here(self.kept - freed)

    def _fails_surely(self, after: After) -> bool:
        """Say whether the next run has no room for the request, wherever its earlier allocations may lie.

        It takes the memory of its error and its names, which is free then, again where it lies now. Beyond that the counters
        tell the bytes it took; a part of these may still be in objects that its code can reach, and is not taken again.
        """
        back = after.freed - self.own
        reachable = self.allocated - self.request.nbytes_here(after.freed) - self._kept_bytes(after.freed)
        beyond = self.needed - max(0, reachable) - self.request.nbytes_here(self.own & after.freed)
        device = self.request.device
        segments = () if device is None else device.facts.segments or ()
        beyond -= fragmentation(segments, self._addresses(back)).stranded
        return self._fits(replace(after, freed=back), max(0, beyond), request=self._smallest) is False

    def _at_most(self) -> Iterator[int]:
        """Yield bounds of the bytes that the next run takes of the device, at any time until the request has succeeded."""
        oom, note = self.request.oom, self.request.oom.note
        if self.since is None and note is None:
            return
        allocated = self.allocated if note is None else max(self.allocated, note.allocated + note.slack)
        most = max(0, max(allocated, self._peak()) - self._kept_bytes())
        yield 2 * most  # blocks of other sizes left free in between: as much again
        counts = None if note is None else note.counts
        if oom.start is None or counts is None:
            return
        made, blocks = max(0, counts.made - oom.start.made), max(0, counts.made_blocks - oom.start.made_blocks)
        yield _without_reuse(made, blocks)

    def _peak(self) -> int:
        note, device = self.request.oom.note, self.request.device
        stats = None if device is None else device.facts.allocator
        peaks = (None if note is None else note.peak_allocated, None if stats is None else stats.peak_allocated)
        return max((peak for peak in peaks if peak is not None), default=0)

    def _comes_further(self, after: After) -> bool | None:
        """Say whether the next run, by the same steps as the first, gets past the request, or None if it may take others.

        No free block serves the request, as none did, since the free memory in segments is filled again by then.
        """
        same = self._as_before(after)
        return None if same is None else self._fits(after, same, is_new=True)

    def _as_before(self, after: After) -> int | None:
        """Return the bytes that the first run took of the device if the next one takes the same steps, or None if it may not.

        It does where it begins in the state of the first, with the same bytes in use and reserved, but for whole segments of
        objects that the cell cannot reach. The allocator is deterministic, the first run emptied the cache only when it failed,
        and no full collection let go of memory in between.
        """
        oom, device = self.request.oom, self.request.device
        note, start = oom.note, oom.start
        if note is None or note.counts is None or start is None or device is None or device.room.is_expandable:
            return None
        reserved = 0 if device.facts.allocator is None else device.facts.allocator.reserved
        if (device.facts.free or 0) + reserved < note.free + note.reserved:
            return None  # others on the device have taken more since
        if oom.has_replaced or note.counts.retries != start.retries + 1 or note.counts.collections != start.collections:
            return None
        segments, pools = device.facts.segments or (), device.room.in_use if after.pools is None else after.pools
        back, also = (
            fragmentation(segments, self._addresses(freed), pools) for freed in (after.freed - self.kept, after.freed)
        )
        if also.releasable and not after.is_emptied:
            return None  # its first blocks come to lie in free segments, and which, the order decides
        is_same = (back.allocated, back.reserved - back.releasable) == (start.allocated, start.reserved)
        if not is_same or back.pending or back.kept or also.stranded != back.stranded:
            return None
        return max(0, note.reserved - start.reserved)

    def _addresses(self, storages: Set[int]) -> set[int]:
        graph = self.request.facts.graph
        return {graph.storages[n].address for n in storages if graph.storages[n].device == self.request.name}

    # --- earlier runs of the same cell ------------------------------------------------------------------------------------

    @cached_property
    def further(self) -> tuple[EarlierFailure, ...]:
        """Return the failed runs of the same source that had come further than this one, the one that needed most first."""
        oom, counts = self.request.oom, None if self.request.oom.note is None else self.request.oom.note.counts
        start = oom.start
        made = -1 if counts is None or start is None else max(0, counts.made - start.made)
        further = (run for run in oom.earlier if run.made > made)
        return tuple(sorted(further, key=lambda run: run.taken + run.requested, reverse=True))

    @cached_property
    def needed_before(self) -> EarlierFailure | None:
        """Return the failed run that came further, worked on the same, and needed most at one time, or None."""
        same = [run for run in self.further if run.is_of_same_inputs and run.needed is not None]
        return max(same, key=lambda run: run.needed or 0, default=None)

    @property
    def has_outgrown(self) -> bool:
        """Say whether an earlier run's memory, with its request, was more than the device has."""
        ceiling = self.ceiling
        return ceiling is not None and any(run.taken + run.requested > ceiling for run in self.further)

    def _passes(self, run: EarlierFailure, after: After) -> bool:
        """Say whether there is room for all that an earlier run took at most, and for the request at which it failed."""
        bounds = (2 * run.peak, _without_reuse(run.made, run.made_blocks))
        request = replace(self.request, oom=replace(self.request.oom, requested=run.requested, slack=0))
        return self._fits_beside_one_of(after, bounds, request)

    # --- verdicts ---------------------------------------------------------------------------------------------------------

    @cached_property
    def ceiling(self) -> int | None:
        """Return the bytes that PyTorch could have of the device if all else were let go of, or None if unknown."""
        device = self.request.device
        if device is None or (total := device.facts.total) is None:
            return None
        facts = device.facts
        listed = None if facts.nvml is None else facts.nvml.processes
        used = [one.used for one in listed or () if one.pid != self.request.facts.pid]
        if facts.free is None or facts.allocator is None or listed is None or None in used:
            return total
        pools = sum(pool.returnable for pool in facts.library_pools)
        return min(total, facts.free + facts.allocator.reserved + pools + sum(nbytes or 0 for nbytes in used))

    @cached_property
    def whole(self) -> int:
        """Return the bytes that the cell needs at the same time, at least, the request among them.

        The list that it builds is known to its end where all that the cell has made so far are blocks of one size.
        """
        surely = max(0, self.needed - (self.since or 0)) if self.is_taken_exact else 0  # the rest may have been unreachable
        list_bytes = 0 if self._elements_left is None else (self.request.oom.elements or 0) * self._segment
        return max(surely + (self._smallest.nbytes or 0), self._segment, list_bytes)

    @cached_property
    def _smallest(self) -> FailedRequest:
        """Return the smallest request that the error may tell of; of a list's elements, as they are told by their blocks."""
        return self.request if self.is_list_known else self.request.smallest

    @cached_property
    def _segment(self) -> int:
        """Return the bytes that the request takes of the device."""
        asked = self.request.oom.requested
        return segment_size(self.request.nbytes or 0) if asked is None else asked

    @cached_property
    def _elements_left(self) -> int | None:
        """Return how many requests of the same size follow, if the cell builds a list of known length, else None."""
        oom = self.request.oom
        counts = None if oom.note is None else oom.note.counts
        if not oom.elements or counts is None or oom.start is None:
            return None
        made, blocks = counts.made - oom.start.made, counts.made_blocks - oom.start.made_blocks
        return oom.elements - blocks - 1 if 0 < blocks < oom.elements and made == blocks * self._segment else None

    @property
    def is_list_known(self) -> bool:
        """Say whether the bytes are known that the rest of the list takes which the failing line builds."""
        return self._elements_left is not None

    @cached_property
    def can_never_fit(self) -> bool:
        """Say whether the device is too small for the cell's own needs."""
        if self.request.nbytes is None or self.ceiling is None or self.request.is_of_host:
            return False
        before = self.needed_before
        return max(self.whole, (before and before.needed) or 0) > self.ceiling

    def verdict(self, after: After) -> RerunVerdict:
        """Return the verdict on a rerun of the cell from its first line."""
        alone = self._fits(after, 0)
        if alone is None:
            return RerunVerdict.UNKNOWN
        if self.can_never_fit or self._fails_surely(after):
            return RerunVerdict.SHORT
        if not alone:  # one as large as the segment that was asked for
            return RerunVerdict.UNKNOWN if self._fits(after, 0, request=self._smallest) else RerunVerdict.SHORT
        comes_further = self._comes_further(after)
        if comes_further or self._fits_beside_one_of(after, self._at_most(), self.request):
            is_enough = not self._caught_others and all(self._passes(run, after) for run in self.further)
            return RerunVerdict.RERUN if is_enough else RerunVerdict.REQUEST
        return RerunVerdict.REQUEST if comes_further is None else RerunVerdict.SHORT

    @property
    def _caught_others(self) -> bool:
        """Say whether the cell caught the errors of earlier requests, which may succeed in the next run, and take memory."""
        counts, start = None if self.request.oom.note is None else self.request.oom.note.counts, self.request.oom.start
        return counts is not None and start is not None and counts.failures > start.failures + 1

    def _fits_beside_one_of(self, after: After, bounds: Iterable[int], request: FailedRequest) -> bool:
        """Say whether a request has room next to the run's earlier memory, by one of the bounds, wherever that lies."""
        return any(self._fits(after, most, is_pinned=most > 0, request=request) for most in bounds)

    def _fits(
        self,
        after: After,
        taken: int,
        *,
        is_new: bool = False,
        is_pinned: bool = False,
        request: FailedRequest | None = None,
    ) -> bool | None:
        later = 0 if request not in (None, self.request) else (self._elements_left or 0) * self._segment
        return (request or self.request).would_succeed(
            after.freed,
            after.pools,
            is_emptied=after.is_emptied,
            taken=taken + later,
            limited=after.is_limited,
            more=after.more,
            is_new=is_new,
            is_pinned=is_pinned,
        )


def _without_reuse(nbytes: int, blocks: int) -> int:
    """Return the bytes that blocks take of the device at most, as if none of them were ever free again."""
    if blocks <= 1:
        return segment_size(nbytes) if nbytes else 0
    return nbytes + min(nbytes + _MOST_WASTED, blocks * _MOST_WASTED)


def _without_learners(facts: Facts) -> Facts:
    """Return facts that keep a plan from clearing any Learner's leftovers."""
    return Facts(tracked=facts.tracked, devices=facts.devices, graph=facts.graph, pools=facts.pools)


def _bound_by_the_run(facts: Facts, oom: OomFact) -> set[int]:
    """Return the storages that only names which the failed run has bound, and its error, hold."""
    graph = facts.graph

    def is_its_own(root: Root) -> bool:
        return root.kind == "name" and root.label in oom.bound

    own = {number for number, root in enumerate(graph.roots) if is_its_own(root)}
    others = (n for n, root in enumerate(graph.roots) if n not in own and root.kind != "error")
    return storages_of(graph, reach_of_roots(graph, own)) - storages_of(graph, reach_of_roots(graph, others)) if own else set()


def _kept(facts: Facts, oom: OomFact) -> frozenset[int]:
    """Return the storages that names and displayed results hold which the cell has not bound and cannot reach."""
    if oom.reaches is None:
        return frozenset()
    graph, touched = facts.graph, {*oom.reaches, *oom.uses, *oom.bound}
    old = {n for n, root in enumerate(graph.roots) if root.kind in _UNTOUCHED and root.label not in touched}
    others = (n for n, root in enumerate(graph.roots) if n not in old and root.kind not in _HELD_BY_NOBODY)
    return frozenset(storages_of(graph, reach_of_roots(graph, old)) - storages_of(graph, reach_of_roots(graph, others)))
