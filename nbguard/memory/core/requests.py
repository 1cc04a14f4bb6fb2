"""PyTorch's rules of requests for memory, apart from their model: would one succeed now, and how large may one be?

`memory` knows live segments and who holds them, `allocator` the model: neither may import the other, and a model built from
live segments would have to guess facts that they lack (ages, address space). The rule needs none of that, and a test asks the
model on copied states whether it is right (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.memory.core.advice import NONE, Advice, Finding, least_shown, release_names, release_stale
from nbguard.memory.core.facts import DeviceFacts, Facts, Graph, PoolFact, PoolId, Segment
from nbguard.memory.core.fragmentation import (
    EXPANDABLE_PAGE,
    Fragmentation,
    PoolKey,
    by_pool,
    fragmentation,
    free_runs,
    left_in_segments,
    returnable_part,
)
from nbguard.memory.core.references.graph import STALE_KINDS, path_text, reach_of_roots, shortest_path
from nbguard.memory.core.references.releases import release_of_way
from nbguard.units import format_bytes

# --- The allocator's pools by name, their owners, how much of each is free, and whether it can be given back.


# --- The CUDA graphs or MemPools that own the allocator's private pools, and the line that ends each one's ownership.


_FAILED = Advice(command="", effect="freed only with the kernel; a capture that failed keeps it, and no line ends that")
_UNKNOWN = replace(release_stale(), effect="gives it back, unless a CUDA graph still uses it, or a capture that failed")
_OF_LIBRARIES = Advice(command="", effect="freed with a library's own objects; no name of yours leads to it")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOwner:
    """The owner of a private pool in words."""

    name: str  # `CUDAGraph g`, by the path to it; or that it is not known
    advice: Advice  # lets the pool go; without a command why nothing does


def owner_of_pool(facts: Facts, pool: PoolId) -> PoolOwner:
    """Return whose a private pool is; the user's own names come first."""
    fact = next((each for each in facts.pools if each.pool == pool), None)
    if fact is None:
        return PoolOwner(name=f"pool {pool} of an object that is not known", advice=_UNKNOWN)
    if fact.is_left:
        return PoolOwner(name=f"pool {pool} that an empty cache left", advice=_FAILED)
    kind = facts.graph.nodes[fact.keepers[0]].type_name
    path = next(_paths(facts.graph, fact.keepers), "")
    return PoolOwner(name=f"{kind} {path}".rstrip(), advice=_release(facts.graph, fact))


def _paths(graph: Graph, keepers: tuple[int, ...]) -> Iterator[str]:
    for root in sorted(graph.roots, key=lambda root: root.kind in STALE_KINDS):
        if way := shortest_path(graph, root, keepers):
            yield path_text(graph, root, way, shorten=4)


def _release(graph: Graph, fact: PoolFact) -> Advice:
    """Return the line that lets all go which keep a pool, wherever they are."""
    own = [root for root in graph.roots if root.kind not in STALE_KINDS]
    lines = [
        release_of_way(graph, root, way)
        for root in own
        for keeper in fact.keepers
        if (way := shortest_path(graph, root, {keeper}))
    ]
    if not lines:
        stale = reach_of_roots(graph, range(len(graph.roots)))
        return release_stale() if stale.intersection(fact.keepers) else _OF_LIBRARIES
    if all(line.targets for line in lines):
        return release_names([*dict.fromkeys(text for line in lines for text in line.targets)])
    without = next((line for line in lines if not line.targets), NONE)
    return without if without.command or without.effect else _OF_LIBRARIES


_ONE_NUMBER = 512
"""Bytes of the block of a tensor of one element."""
_WORTH_SAYING = 0.05
"""Least share of a device's reserved memory at which a private pool has a line of its own."""
_GIVES_BACK = "releases it, and memory that no tensor of the pool pins goes back to the device"


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of a device in the words of the user, with its bytes. The pools of a device add up to the bytes reserved."""

    name: str
    space: Fragmentation


def pools_in_use(facts: Facts, alive: Set[int] | None = None) -> frozenset[PoolId]:
    """Return the private pools that are not known to be let go: an object keeps them (one of the nodes `alive`, if given).

    The `doubtful_pools` are among them: memory that cannot be promised stays.
    """
    return frozenset(pool.pool for pool in facts.pools if _is_kept(pool, alive)) | doubtful_pools(facts, alive)


def doubtful_pools(facts: Facts, alive: Set[int] | None = None) -> frozenset[PoolId]:
    """Return the private pools that may be in use and may not: nothing named of the nodes `alive` keeps them.

    A graph that is gone has let its pool go, a capture that failed never does, and no snapshot tells the two apart.
    """
    known = {pool.pool for pool in facts.pools}
    unknown = {s.pool for device in facts.devices for s in device.segments or () if s.is_private and s.pool not in known}
    return frozenset(unknown | {pool.pool for pool in facts.pools if _is_doubtful(pool) and not _is_kept(pool, alive)})


def _is_doubtful(pool: PoolFact) -> bool:
    return pool.is_shared or bool(pool.unnamed)


def _is_kept(pool: PoolFact, alive: Set[int] | None) -> bool:
    named = set(pool.keepers).difference(pool.unnamed)
    return pool.is_left or bool(named if alive is None else named & alive)


def left_pools(facts: Facts) -> frozenset[PoolId]:
    """Return the private pools that an empty cache left though nothing named kept them."""
    return frozenset(pool.pool for pool in facts.pools if pool.is_left)


def with_free_segments(segments: Iterable[Segment], pools: Collection[PoolId]) -> frozenset[PoolId]:
    """Return those of `pools` that `empty_cache` would give memory back of, were none of them in use."""
    return frozenset(each.pool for each in segments if each.pool in pools and fragmentation((each,)).releasable)


def returnable(
    facts: Facts,
    device: DeviceFacts,
    storages: Iterable[int],
    in_use: Collection[PoolId],
    blocks: Set[int] = frozenset(),
) -> int:
    """Return the bytes that `empty_cache` gives back to `device` once `storages` and the `blocks` there are free."""
    freed = _freed(facts, device, storages) | blocks
    return fragmentation(device.segments or (), freed, in_use).releasable


def _freed(facts: Facts, device: DeviceFacts, storages: Iterable[int]) -> Set[int]:
    """Return the addresses on `device` of the blocks of these storages."""
    gone = (facts.graph.storages[number] for number in storages)
    return {storage.address for storage in gone if storage.device == device.device}


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The effect of `empty_cache` on all devices once some storages are free, in bytes."""

    released: int  # go back to the device, cached memory that was free before included
    at_most: int  # the same, if the pools that may be in use and may not (`doubtful_pools`) are not, nor graphs' pools
    stranded: int  # of the freed bytes stay with PyTorch: other blocks live in their segments (or pages), or pools are in use


def given_back(
    facts: Facts, storages: Iterable[int], alive: Set[int] | None = None, blocks: Mapping[str, Set[int]] | None = None
) -> GivenBack | None:
    """Return the bytes that `empty_cache` gives back on all devices once `storages` are free, or None without segments.

    `alive` are the nodes that stay (all if None), `blocks` addresses by device that are free then, too.
    """
    in_use = pools_in_use(facts, alive)
    kept = in_use - doubtful_pools(facts, alive)
    goes = any(pool.keepers and pool.pool not in kept for pool in facts.pools)
    devices = [device for device in facts.devices if device.segments is not None]
    gone, also = set(storages), blocks or {}
    released = at_most = stranded = 0
    for device in devices:
        freed = _freed(facts, device, gone) | also.get(device.device, frozenset())
        released += fragmentation(device.segments or (), freed, in_use).releasable
        with_graph = _graph_numbers(facts, device) if goes else frozenset[int]()
        at_most += fragmentation(device.segments or (), freed | with_graph, kept).releasable
        stranded += left_in_segments(device.segments or (), freed, kept)
    return GivenBack(released, at_most, stranded) if devices else None


def _graph_numbers(facts: Facts, device: DeviceFacts) -> Set[int]:
    """Return the addresses of blocks of one number each that no Python object holds.

    A random generator keeps two of them for CUDA graphs, and lets go of them with the last graph.
    """
    held = {storage.address for storage in facts.graph.storages if storage.device == device.device}
    blocks = (block for segment in device.segments or () if segment.is_small for block in segment.blocks)
    return {b.address for b in blocks if b.state == "active_allocated" and b.size == _ONE_NUMBER and b.address not in held}


def pools_of(facts: Facts, device: DeviceFacts) -> tuple[Pool, ...]:
    """Return the pools of `device`: small blocks, large blocks, blocks of other streams, of CUDA graphs and MemPools."""
    if device.segments is None:
        return ()
    spaces = by_pool(device.segments, in_use=pools_in_use(facts))
    return tuple(Pool(_name(facts, key), space) for key, space in spaces.items())


def _name(facts: Facts, key: PoolKey) -> str:
    words = ["small blocks" if key.is_small else "large blocks"]
    if key.pool != (0, 0):
        words.insert(0, owner_of_pool(facts, key.pool).name)
    elif key.stream:
        words.append(f"stream {key.stream:#x}")
    return " · ".join(words)


def pool_findings(facts: Facts, device: DeviceFacts) -> Iterator[Finding]:
    """Yield a finding for each private pool whose graph or MemPool keeps much memory that no tensor has."""
    segments = device.segments or ()
    held = {storage.address for storage in facts.graph.storages if storage.device == device.device}
    reserved = sum(segment.total_size for segment in segments)
    least = max(least_shown(reserved), int(_WORTH_SAYING * reserved))
    for pool in dict.fromkeys(segment.pool for segment in segments if segment.is_private):
        of_pool = [segment for segment in segments if segment.pool == pool]
        used = sum(block.size for segment in of_pool for block in segment.blocks if block.address in held)
        nbytes = sum(segment.total_size for segment in of_pool) - used
        if nbytes < least:
            continue
        owner = owner_of_pool(facts, pool)
        how = owner.advice.code + f" {_GIVES_BACK}" if owner.advice.targets else owner.advice.code + f" {owner.advice.effect}"
        yield Finding("pool", f"{owner.name} keeps {format_bytes(nbytes)} in its pool: {how.strip()}", owner.advice)


SMALL_MAX = 1024**2
"""A request of at most this many bytes is served by the small pool."""
_SMALL_SEGMENT = 2 * 1024**2
_MIN_LARGE = 10 * 1024**2
"""Requests from here on get a segment of their own size, in steps of 2 MiB; smaller ones one of 20 MiB."""
_LARGE_SEGMENT = 20 * 1024**2
_STEP = 2 * 1024**2
_MINIMUM = 512
_NO_LIMIT = 1 << 62
_OTHER_RULES = ("roundup_power2_divisions", "large_segment_size", "throw_on_cudamalloc_oom")
"""Settings that may make a request need more than is computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestRequest:
    """The largest request of the default stream in bytes, or None if the free memory is unknown."""

    cached: int  # bytes of the largest free block that it can get: served without asking the device
    now: int | None  # bytes, also with new memory from the device's free bytes (cudaMemGetInfo)
    flushed: int | None  # bytes, also after PyTorch has emptied its cache, as it does by itself before it gives up
    is_bound: bool = False  # a setting rounds requests otherwise: it may be less
    is_growth_bound: bool = False  # `now`, `flushed` may be less: nothing tells where an expandable segment's addresses end


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMemory:
    """The new memory that the device can give a request, apart from its present free memory. Sizes are bytes."""

    back: int  # the device gets back first, less the bytes taken before
    allowed: int  # the memory fraction leaves (`torch.cuda.set_per_process_memory_fraction`)
    is_expandable: bool  # it extends a segment page by page
    tail: int  # free at the end of the last stretch of an expandable segment of the large pool
    small_tail: int  # the same of the small pool

    def largest(self, free: int) -> int:
        """Return the largest request that it serves while `free` bytes of the device are free."""
        device = free + self.back
        if self.is_expandable:
            page = EXPANDABLE_PAGE["large"]
            largest = min(self.tail + max(device, 0) // page * page, max(self.allowed, 0) // _STEP * _STEP)
            if largest > SMALL_MAX and self.fits(largest, free):
                return largest
            return SMALL_MAX if self.fits(SMALL_MAX, free) else 0
        room = min(device, self.allowed)
        if room >= _MIN_LARGE:
            return room // _STEP * _STEP
        return SMALL_MAX if room >= _SMALL_SEGMENT else 0

    def fits(self, rounded: int, free: int) -> bool:
        """Say whether it serves a request of `rounded` bytes while `free` bytes of the device are free."""
        need = segment_size(rounded)
        if need > self.allowed:
            return False
        is_small = rounded <= SMALL_MAX
        page, tail = (EXPANDABLE_PAGE["small"], self.small_tail) if is_small else (EXPANDABLE_PAGE["large"], self.tail)
        return (-(-(rounded - tail) // page) * page if self.is_expandable else need) <= free + self.back


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of the largest request, apart from the device's free memory; they hold until a segment or block changes.

    With them a tick knows the request that fits now, though other processes take and free memory, without reading the segments.
    """

    cached: int  # bytes of the largest free block that a request can get
    as_it_is: NewMemory
    flushed: NewMemory  # after PyTorch has emptied its cache
    is_bound: bool  # a setting rounds requests otherwise: they may have less

    def largest(self, free: int | None) -> LargestRequest:
        """Return the largest request by each way of serving it while `free` bytes are free, or None if unknown."""
        if free is None:
            return LargestRequest(cached=self.cached, now=None, flushed=None, is_bound=self.is_bound)
        now = max(self.cached, self.as_it_is.largest(free))
        return LargestRequest(
            cached=self.cached,
            now=now,
            flushed=max(now, self.flushed.largest(free)),
            is_bound=self.is_bound,
            is_growth_bound=bool(self.as_it_is.tail or self.flushed.tail),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that a request on one device can have, by its free blocks and by the memory that the device can still give.

    The one rule on requests that would succeed: everything that says how large one may be asks it.
    """

    device: DeviceFacts  # with its segments and free bytes
    in_use: Collection[PoolId] = ()  # private pools that keep their segments
    freed: Collection[int] = ()  # addresses of live blocks that are free in this room
    stream: int = 0  # address of the stream that the request is made on; 0 for the default one
    is_emptied: bool = False  # the cache has been emptied since: releasable bytes are the device's
    taken: int = 0  # bytes, allocated before the request: neither a free block nor the device has them any more
    is_pinned: bool = False  # taken memory may lie in any segment that is free now, which no emptying gives back then

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the device; none where they are not known."""
        return self.device.segments or ()

    @property
    def is_expandable(self) -> bool:
        """Say whether new memory extends a segment page by page."""
        return "expandable_segments:True" in self.device.settings or any(segment.is_expandable for segment in self.segments)

    def largest(self) -> LargestRequest:
        """Return the largest request, by each way of serving it."""
        return self.limits().largest(self.device.free)

    def limits(self) -> RequestLimits:
        """Return the limits of the largest request, which hold while segments and blocks stay as they are."""
        return RequestLimits(
            cached=self._cached(),
            as_it_is=self._new(flush=False),
            flushed=self._new(flush=True),
            is_bound=any(key in self.device.settings for key in _OTHER_RULES),
        )

    def fits(self, nbytes: int, *, is_new: bool = False) -> bool | None:
        """Say whether a request would succeed, the cache emptied if need be, or None if unknown.

        `is_new` says that no free block serves it: only the memory that the device can still give does.
        """
        rounded = rounded_to_blocks(nbytes)
        small = rounded <= SMALL_MAX
        if not is_new and any(size >= rounded for size in self._free_blocks(small=small)):
            return True
        if self.device.free is None:
            return None
        flushes = (False, True) if self.is_expandable else (True,)  # else an empty cache never makes room for less
        return any(self._new(flush=flush).fits(rounded, self.device.free) for flush in flushes)

    def fits_on_any_stream(self, nbytes: int, *, is_new: bool = False) -> bool | None:
        """Say whether a request would succeed whichever stream it is made on: a free block serves its own stream only."""
        streams = {0} | {segment.stream for segment in self.segments if not segment.is_private}
        answers = [replace(self, stream=stream).fits(nbytes, is_new=is_new) for stream in sorted(streams)]
        return False if False in answers else None if None in answers else True

    def releasable(self) -> int:
        """Return the bytes that `empty_cache` gives back."""
        return fragmentation(self.segments, self._freed(flush=True), self.in_use).releasable

    def missing(self, need: int) -> int:
        """Return how many bytes more must come back for a new segment of `need` bytes; 0 or less: none."""
        back, allowed = self._budget(flush=True)
        return need - min((self.device.free or 0) + back, allowed)

    def serving(self, *, small: bool) -> Sequence[Segment]:
        """Return the segments whose free blocks a request can get."""
        return [
            segment
            for segment in self.segments
            if (segment.pool, segment.stream, segment.is_small) == ((0, 0), self.stream, small)
        ]

    def _free_blocks(self, *, small: bool) -> Iterator[int]:
        """Yield the bytes of each free block that a request can get, less those `taken` before."""
        freed = self._freed(self.is_emptied)
        for segment in self.serving(small=small):
            for start, size in free_runs(segment, freed):
                at, back = returnable_part(segment, start, size) if self.is_emptied else (start, 0)
                yield from (part - self.taken for part in ((at - start, start + size - at - back) if back else (size,)))

    def _cached(self) -> int:
        """Return the largest request that a free block serves."""
        large, small = (max(self._free_blocks(small=small), default=0) for small in (False, True))
        return large if large > SMALL_MAX else max(0, min(small, SMALL_MAX))

    def _budget(self, flush: bool) -> tuple[int, int]:
        """Return (bytes the device gets back less those taken before, bytes the memory fraction allows)."""
        flush |= self.is_emptied
        space = fragmentation(self.segments, self._freed(flush), self.in_use)
        back = space.releasable if flush and (self.is_emptied or not self.is_pinned) else 0
        limit, total = self.device.limit, self.device.total
        is_limited = limit is not None and (total is None or limit < total)
        return back - self.taken, (limit or 0) - space.reserved - self.taken + back if is_limited else _NO_LIMIT

    def _freed(self, flush: bool) -> Collection[int]:
        """Return the addresses of blocks that are free then: emptying the cache waits for blocks that other streams use."""
        if not flush:
            return self.freed
        waiting = {
            block.address for segment in self.segments for block in segment.blocks if block.state == "active_pending_free"
        }
        return waiting | set(self.freed)

    def _tail(self, flush: bool, *, small: bool) -> int:
        """Return the free bytes at the end of the last stretch of an expandable segment: a request starts there."""
        if not self.is_expandable:
            return 0
        flush |= self.is_emptied
        page, freed = EXPANDABLE_PAGE["small" if small else "large"], self._freed(flush)
        for segment in sorted(self.serving(small=small), key=lambda segment: -segment.address):
            start, size = list(free_runs(segment, freed))[-1:][0] if segment.blocks and _ends_free(segment, freed) else (0, 0)
            if not segment.is_expandable or (flush and size == segment.total_size):
                continue
            return min(size, -(start - segment.address) % page) if flush else size
        return 0

    def _new(self, *, flush: bool) -> NewMemory:
        """Return the new memory that the device can give, after the cache was emptied or as it is."""
        back, allowed = self._budget(flush)
        return NewMemory(
            back=back,
            allowed=allowed,
            is_expandable=self.is_expandable,
            tail=self._tail(flush, small=False),
            small_tail=self._tail(flush, small=True),
        )


def rounded_to_blocks(nbytes: int) -> int:
    """Return the size of the block that a request needs."""
    return max(_MINIMUM, -(-nbytes // _MINIMUM) * _MINIMUM)


def segment_size(rounded: int) -> int:
    """Return the bytes that PyTorch asks of the device for a rounded request."""
    if rounded <= SMALL_MAX:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if rounded < _MIN_LARGE else -(-rounded // _STEP) * _STEP


def largest_request_in(segment: int) -> int:
    """Return the largest request that PyTorch may have asked the device for `segment` bytes for, as its errors say.

    An out-of-memory error tells the bytes of the segment, not of the request: one of 2 MiB is for a request of the small pool.
    Bytes that are no segment's size are taken for the request's own.
    """
    return SMALL_MAX if segment == _SMALL_SEGMENT else segment


def smallest_request_in(segment: int) -> int:
    """Return the smallest request that PyTorch may have asked the device for `segment` bytes for.

    Two sizes of segments are for requests of many sizes. Others are taken for the request's own, up to 2 MiB smaller.
    """
    return {_SMALL_SEGMENT: _MINIMUM, _LARGE_SEGMENT: SMALL_MAX + _MINIMUM}.get(segment, segment)


def largest_segment_within(nbytes: int) -> int:
    """Return the largest size of a segment of up to `nbytes`, where an error tells it rounded; above 10 MiB whole steps."""
    return nbytes // _STEP * _STEP if nbytes >= _MIN_LARGE else nbytes


def _ends_free(segment: Segment, freed: Collection[int]) -> bool:
    last = segment.blocks[-1]
    return last.state == "inactive" or last.address in freed
