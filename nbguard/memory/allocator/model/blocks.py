"""Blocks of memory, the ordered sets of free blocks that the allocator searches, and their form in PyTorch's snapshots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nbguard.memory.allocator.model.settings import PoolId

# --- The calls that the model makes to the device's driver, and a simulated driver that only counts bytes.


class Driver(Protocol):
    """The calls that get memory for the allocator and give it back. Sizes and addresses in bytes."""

    def allocate(self, size: int) -> int | None:
        """Return the address of a new segment, or None where there is no room (cudaMalloc)."""

    def release(self, address: int, size: int) -> None:
        """Take a segment back (cudaFree)."""

    def reserve(self, size: int) -> int:
        """Return the start of `size` bytes of address space, with no memory in it."""

    def unreserve(self, address: int, size: int) -> None:
        """Take address space back."""

    def map(self, address: int, size: int) -> bool:
        """Put memory behind some pages; False, and nothing is changed, where there is no room."""

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind some pages back."""

    def free(self) -> int | None:
        """Return the bytes that are left on the device; None if that is not known."""


_FIRST, _LAST = 1 << 41, 1 << 56
_STRIDE, _SLOTS = 1 << 42, 1 << 14


@dataclass(slots=True)
class Addresses:
    """A source of addresses for segments and ranges: each above the one before, each below it, or in no order."""

    order: Literal["ascending", "descending", "scattered"] = "ascending"
    seed: int = 0  # of "scattered": the same seed gives the same addresses
    taken: int = 0  # addresses given so far
    edge: int = 0  # bytes of address space given so far

    def next(self, size: int) -> int:
        """Return the address of the next `size` bytes."""
        span = -(-size // 2**21) * 2**21
        number = self.taken
        self.taken += 1
        address = self.edge
        self.edge += span
        if self.order == "descending":
            return _LAST - self.edge
        if self.order == "scattered" and number < _SLOTS:
            odd = (self.seed * 2 + 1) * 2_654_435_761 | 1  # coprime to the number of slots, so that each is used once
            address += (number * odd + self.seed) % _SLOTS * _STRIDE
        return _FIRST + address


class SimulatedDriver:
    """A device that counts the bytes taken and makes up addresses.

    Args:
        capacity: bytes that the allocator can have in all; None for a device without end.
        given: addresses of the first segments and ranges, in the order of the requests for them.
        addresses: the source of all further addresses; ascending by default.
        used: bytes that are taken already.
    """

    def __init__(
        self, capacity: int | None = None, given: Iterable[int] = (), addresses: Addresses | None = None, used: int = 0
    ) -> None:
        self.capacity = capacity
        self.used: int = used
        self.calls: int = 0
        self.given: list[int] = list(given)[::-1]
        self.addresses: Addresses = addresses or Addresses()

    def allocate(self, size: int) -> int | None:  # noqa: D102
        self.calls += 1
        return self.reserve(size) if self._take(size) else None

    def release(self, address: int, size: int) -> None:  # noqa: ARG002, D102
        self.calls += 1
        self.used -= size

    def reserve(self, size: int) -> int:  # noqa: D102
        return self.given.pop() if self.given else self.addresses.next(size)

    def unreserve(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002, D102
        self.calls += 1
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002, D102
        self.calls += 1
        self.used -= size

    def free(self) -> int | None:  # noqa: D102
        return None if self.capacity is None else self.capacity - self.used

    def _take(self, size: int) -> bool:
        if self.capacity is not None and self.used + size > self.capacity:
            return False
        self.used += size
        return True


SIZE_SHIFT = 79
"""Free blocks are ordered by one integer: size / 512, 40 bits of a counter (0 where addresses decide), address / 512 in 48
bits. A size is a multiple of 512, so `size << 79` is size / 512 above the other 88 bits."""

COUNTER_SHIFT = 48

FREE, LIVE, PENDING, UNMAPPED = range(4)
"""States of a block. A PENDING block was freed and waits for another stream; UNMAPPED is address space without memory."""


class Range:
    """The address space of one expandable segment, mapped page by page."""

    __slots__ = ("base", "counter", "page", "size")

    def __init__(self, base: int, size: int, page: int, counter: int) -> None:
        self.base: int = base  # first address
        self.size: int = size  # bytes, mapped or not
        self.page: int = page  # bytes of a page: 2 MiB for small blocks, the large segment size for large ones
        self.counter: int = counter  # number of the segment in the order of making; 0 where addresses decide


class ModelBlock:
    """A block of the model: one piece of a segment (torch's `Block`)."""

    __slots__ = (
        "address",
        "born",
        "home",
        "next",
        "prev",
        "range",
        "rank",
        "requested",
        "size",
        "state",
        "streams",
        "waits",
    )

    def __init__(self, address: int, size: int, home: FreeSet, range_: Range | None, rank: int, state: int) -> None:
        self.address: int = address  # of the first byte
        self.size: int = size  # bytes, a multiple of 512
        self.home: FreeSet = home  # the set that the block lies in when it is free, one for each pool and stream
        self.range: Range | None = range_  # address space of its expandable segment; None in a classic segment
        self.rank: int = rank  # counter that orders free blocks of one size, shifted by COUNTER_SHIFT; 0 where addresses decide
        self.state: int = state  # FREE, LIVE, PENDING or UNMAPPED
        self.prev: ModelBlock | None = None  # the neighbour below in the same segment
        self.next: ModelBlock | None = None  # the neighbour above in the same segment
        self.requested: int = 0  # bytes of the last request; kept when the block becomes free, as in PyTorch's snapshots
        self.born: int = 0  # the pool's count of searches when the block became free (torch's `gc_count_base`)
        self.waits: int = 0  # events of other streams that a pending block waits for (torch's `event_count`)
        self.streams: set[int] | None = None  # other streams that used the block (torch's `stream_uses`)

    @property
    def is_split(self) -> bool:
        """True if the segment has other blocks too."""
        return self.prev is not None or self.next is not None

    @property
    def growable_size(self) -> int:
        """Bytes that the block can have without new address space: its own and the unmapped bytes right behind it."""
        follower = self.next
        return self.size + (follower.size if follower is not None and follower.state == UNMAPPED else 0)

    def whole_pages(self) -> tuple[int, int]:
        """Return (start, end) of the whole pages inside a block of a range; without any, the end is not above the start."""
        space = self.range
        assert space is not None
        first = -(-(self.address - space.base) // space.page) * space.page + space.base
        last = (self.address + self.size - space.base) // space.page * space.page + space.base
        return first, last

    def put_before(self, follower: ModelBlock) -> None:
        """Link this block in before `follower`."""
        self.prev, self.next = follower.prev, follower
        if follower.prev is not None:
            follower.prev.next = self
        follower.prev = self

    def put_after(self, leader: ModelBlock) -> None:
        """Link this block in after `leader`."""
        self.prev, self.next = leader, leader.next
        if leader.next is not None:
            leader.next.prev = self
        leader.next = self

    def swallow(self, neighbour: ModelBlock) -> None:
        """Take over the bytes of a neighbour, which ceases to exist."""
        if neighbour is self.prev:
            self.address = neighbour.address
            self.prev = neighbour.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.prev = self
        self.size += neighbour.size


class FreeSet:
    """Free blocks of one pool and stream in the order of the search, and unmapped blocks by address.

    `keys` and `blocks` run parallel: a list that C code bisects is the fastest ordered set that Python has.
    """

    __slots__ = ("blocks", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool: BlockPool = pool
        self.stream: int = stream
        self.keys: list[int] = []
        self.blocks: list[ModelBlock] = []
        self.unmapped: list[ModelBlock] = []

    def add(self, block: ModelBlock) -> None:
        """Insert a free block; its age counts from now."""
        block.state = FREE
        block.born = self.pool.searches
        key = (block.size << SIZE_SHIFT) + block.rank + (block.address >> 9)
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: ModelBlock) -> None:
        """Remove a free block."""
        index = bisect_left(self.keys, (block.size << SIZE_SHIFT) + block.rank + (block.address >> 9))
        del self.keys[index]
        del self.blocks[index]

    def first(self, size: int) -> int:
        """Return the index of the first block of at least `size` bytes."""
        return bisect_left(self.keys, size << SIZE_SHIFT)

    def add_unmapped(self, block: ModelBlock) -> None:
        """Insert a stretch of address space without memory."""
        block.state = UNMAPPED
        insort(self.unmapped, block, key=_address)

    def remove_unmapped(self, block: ModelBlock) -> None:
        """Remove a stretch of address space without memory."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]


def _address(block: ModelBlock) -> int:
    return block.address


class BlockPool:
    """The small or the large half of a pool, which serves the requests of one size class (torch's `BlockPool`)."""

    __slots__ = ("by_stream", "is_small", "owner", "searches")

    def __init__(self, owner: PrivatePool, is_small: bool) -> None:
        self.owner: PrivatePool = owner
        self.is_small: bool = is_small  # serves requests of at most 1 MiB
        self.by_stream: dict[int, FreeSet] = {}
        self.searches: int = 0  # requests searched here while garbage collection is on (torch's `get_free_blocks_call_count`)

    def of(self, stream: int) -> FreeSet:
        """Return the set of a stream, a new one where there is none."""
        free = self.by_stream.get(stream)
        if free is None:
            free = self.by_stream[stream] = FreeSet(self, stream)
        return free

    def in_order(self) -> Iterator[FreeSet]:
        """Yield the sets of all streams, in the order of their handles."""
        for stream in sorted(self.by_stream):
            yield self.by_stream[stream]


class PrivatePool:
    """A pool with its small and large half: the default one, (0, 0), or one of CUDA graphs or of a MemPool."""

    __slots__ = ("id", "is_in_use", "is_split", "large", "on_oom", "segments", "small")

    def __init__(self, pool_id: PoolId, *, is_split: bool = True, on_oom: bool = False) -> None:
        self.id: PoolId = pool_id
        self.is_split: bool = is_split  # False: a request takes a whole block (a MemPool's `no_split`)
        self.on_oom: bool = on_oom  # serves others when the device is full (a MemPool's `use_on_oom`)
        self.is_in_use: bool = True  # keeps its memory from going back to the driver (torch's `use_count`)
        self.segments: int = 0  # allocations from the driver (torch's `allocation_count`)
        self.small: BlockPool = BlockPool(self, True)
        self.large: BlockPool = BlockPool(self, False)

    @property
    def halves(self) -> tuple[BlockPool, BlockPool]:
        """The small and the large half."""
        return self.small, self.large


# --- Segments and blocks of the model in the form of PyTorch's snapshots.


Json = dict[str, Any]

_STATES = {FREE: "inactive", LIVE: "active_allocated"}


def segments_of(blocks: Iterable[ModelBlock]) -> list[Json]:
    """Return the segments that have `blocks`, by address, as `memory_snapshot()` gives them.

    Of an expandable segment each stretch that has memory is a segment of its own.
    """
    return [_segment(block) for block in blocks if block.prev is None or block.prev.state == UNMAPPED]


def _segment(head: ModelBlock) -> Json:
    blocks: list[ModelBlock] = []
    block: ModelBlock | None = head
    while block is not None and block.state != UNMAPPED:
        blocks.append(block)
        block = block.next
    active = [block for block in blocks if block.state != FREE]
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.state == LIVE),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": head.home.stream,
        "segment_type": "small" if head.home.pool.is_small else "large",
        "segment_pool_id": head.home.pool.owner.id,
        "is_expandable": head.range is not None,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _STATES.get(block.state, "active_pending_free"),
            }
            for block in blocks
        ],
    }
