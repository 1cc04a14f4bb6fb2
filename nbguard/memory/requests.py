"""The largest request that would succeed as things are: by PyTorch's rules, written down apart from the model of them.

`core` knows live segments and who holds them, `allocator` the model: neither may import the other, and a model built from
live segments would have to guess what they do not tell (ages, address space). The rule needs none of that, and a test asks
the model on copied states whether it is right (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nbguard.memory.facts import DeviceFacts, PoolId, Segment
from nbguard.memory.fragmentation import EXPANDABLE_PAGE, fragmentation, free_runs

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
"""Settings under which a request may need more than is computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestRequest:
    """The largest request of the default stream that would succeed, in bytes.

    `cached`: from a free block, without asking the device. `now`: also with what is free on the device. `flushed`: also
    after PyTorch has emptied its cache, which it does by itself before it gives up. None: what is free on the device is not
    known. `is_bound`: a setting rounds requests otherwise, so that it may be less. `is_growth_bound`: `now` and `flushed` may
    be less, as nothing tells where the addresses end that an expandable segment may grow into.
    """

    cached: int
    now: int | None
    flushed: int | None
    is_bound: bool = False
    is_growth_bound: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What requests of the default stream can have on a device, with the blocks at the addresses `freed` free.

    `in_use` are the private pools that keep their segments.
    """

    device: DeviceFacts
    in_use: Collection[PoolId] = ()
    freed: Collection[int] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the device; none where they are not known."""
        return self.device.segments or ()

    @property
    def is_expandable(self) -> bool:
        """Whether new memory extends a segment page by page."""
        return "expandable_segments:True" in self.device.settings or any(each.is_expandable for each in self.segments)

    def largest(self) -> LargestRequest:
        """Return the largest request, by each way of serving it."""
        cached = self.cached()
        is_bound = any(key in self.device.settings for key in _OTHER_RULES)
        if self.device.free is None:
            return LargestRequest(cached=cached, now=None, flushed=None, is_bound=is_bound)
        grows = any(self._tail(flush, small=False) for flush in (False, True))
        now = max(cached, self._new(flush=False))
        return LargestRequest(
            cached=cached, now=now, flushed=max(now, self._new(flush=True)), is_bound=is_bound, is_growth_bound=grows
        )

    def cached(self) -> int:
        """Return the largest free block that a request can get."""
        large = max((size for each in self.serving(small=False) for _, size in free_runs(each, self.freed)), default=0)
        small = max((size for each in self.serving(small=True) for _, size in free_runs(each, self.freed)), default=0)
        return large if large > SMALL_MAX else min(small, SMALL_MAX)

    def fits(self, nbytes: int) -> bool | None:
        """Say whether a request would succeed, the cache emptied if need be; None: not known."""
        rounded = rounded_to_blocks(nbytes)
        small = rounded <= SMALL_MAX
        if any(size >= rounded for each in self.serving(small=small) for _, size in free_runs(each, self.freed)):
            return True
        if self.device.free is None:
            return None
        return any(self._fits_new(rounded, *self._budget(flush), self._tail(flush, small=small)) for flush in (False, True))

    def releasable(self) -> int:
        """Return the bytes that `empty_cache` gives back."""
        return fragmentation(self.segments, self._freed(flush=True), self.in_use).releasable

    def missing(self, need: int) -> int:
        """Return how many bytes more must come back for a new segment of `need` bytes; 0 or less: none."""
        return need - min(self._budget(flush=True))

    def serving(self, *, small: bool) -> Sequence[Segment]:
        """Return the segments whose free blocks a request of the default stream can get."""
        return [each for each in self.segments if each.pool == (0, 0) and not each.stream and each.is_small == small]

    def _budget(self, flush: bool) -> tuple[int, int]:
        """Return (bytes the device can give, bytes the memory fraction allows)."""
        free = self.device.free or 0
        space = fragmentation(self.segments, self._freed(flush), self.in_use)
        back = space.releasable if flush else 0
        limit, total = self.device.limit, self.device.total
        allowed = None if limit is None or (total is not None and limit >= total) else limit - space.reserved + back
        return free + back, _NO_LIMIT if allowed is None else allowed

    def _freed(self, flush: bool) -> Collection[int]:
        """Return what is free then: emptying the cache waits for blocks that other streams still use."""
        if not flush:
            return self.freed
        waiting = {block.address for each in self.segments for block in each.blocks if block.state == "active_pending_free"}
        return waiting | set(self.freed)

    def _tail(self, flush: bool, *, small: bool) -> int:
        """Return the free bytes at the end of the last stretch of an expandable segment: a request starts there."""
        if not self.is_expandable:
            return 0
        page, freed = EXPANDABLE_PAGE["small" if small else "large"], self._freed(flush)
        for segment in sorted(self.serving(small=small), key=lambda each: -each.address):
            start, size = list(free_runs(segment, freed))[-1:][0] if segment.blocks and _ends_free(segment, freed) else (0, 0)
            if not segment.is_expandable or (flush and size == segment.total_size):
                continue
            return min(size, -(start - segment.address) % page) if flush else size
        return 0

    def _fits_new(self, rounded: int, device: int, allowed: int, tail: int) -> bool:
        need = segment_size(rounded)
        if need > allowed:
            return False
        page = EXPANDABLE_PAGE["small" if rounded <= SMALL_MAX else "large"]
        return (-(-(rounded - tail) // page) * page if self.is_expandable else need) <= device

    def _new(self, *, flush: bool) -> int:
        """Return the largest request that new memory would serve."""
        device, allowed = self._budget(flush)
        if self.is_expandable:
            page, tail = EXPANDABLE_PAGE["large"], self._tail(flush, small=False)
            found = min(tail + max(device, 0) // page * page, max(allowed, 0) // _STEP * _STEP)
            if found > SMALL_MAX and self._fits_new(found, device, allowed, tail):
                return found
            return SMALL_MAX if self._fits_new(SMALL_MAX, device, allowed, self._tail(flush, small=True)) else 0
        room = min(device, allowed)
        if room >= _MIN_LARGE:
            return room // _STEP * _STEP
        return SMALL_MAX if room >= _SMALL_SEGMENT else 0


def rounded_to_blocks(nbytes: int) -> int:
    """Return the size of the block that a request needs."""
    return max(_MINIMUM, -(-nbytes // _MINIMUM) * _MINIMUM)


def segment_size(rounded: int) -> int:
    """Return the bytes that PyTorch asks of the device for a rounded request."""
    if rounded <= SMALL_MAX:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if rounded < _MIN_LARGE else -(-rounded // _STEP) * _STEP


def _ends_free(segment: Segment, freed: Collection[int]) -> bool:
    last = segment.blocks[-1]
    return last.state == "inactive" or last.address in freed
