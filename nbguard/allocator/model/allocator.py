"""PyTorch's caching allocator as a model: given the requests of a program, every decision that it takes, exactly."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any

from nbguard.allocator.model import acquire, reclaim
from nbguard.allocator.model.blocks import COUNTER_SHIFT, FREE, LIVE, SIZE_SHIFT, Block, PrivatePool
from nbguard.allocator.model.driver import Driver, SimulatedDriver
from nbguard.allocator.model.layout import Json, segments_of
from nbguard.allocator.model.policy import DEFAULT_POOL, NEWEST, SMALL_MAX, PoolId, parse_version, round_size, tie_break
from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.errors import ModelError

Event = tuple[str, int, int, int]
"""(action, address, bytes, stream) as `device_traces` has them; of an `oom` the second is what the device had left."""


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        settings: what `PYTORCH_ALLOC_CONF` says.
        capacity: bytes of the device; None for one without end.
        fraction: of the device that this process may take (`set_per_process_memory_fraction`); None or 1 is no limit.
        torch_version: decides where versions differ, such as which of two free blocks of one size is taken.
        driver: gives the memory; by default one that counts to `capacity` and makes up addresses.

    `events` holds what happened, oldest first; whoever reads them may empty the list.
    `events_are_instant` says that a block freed after `record_stream` is free at the next request; set it to False to
    decide by `complete_events()`.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        fraction: float | None = None,
        torch_version: str = f"{NEWEST[0]}.{NEWEST[1]}",
        driver: Driver | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.torch_version = torch_version
        self.fraction = fraction if fraction is not None else self.settings.fraction
        self.driver: Driver = driver or SimulatedDriver(capacity)
        self.tie = tie_break(parse_version(torch_version))
        self.cap = int(self.fraction * capacity) if self.fraction and self.fraction < 1 and capacity is not None else None
        self.events: list[Event] = []
        self.events_are_instant = True
        self.pools: dict[PoolId, PrivatePool] = {DEFAULT_POOL: PrivatePool(DEFAULT_POOL)}
        self.live: dict[int, Block] = {}
        self.pending: list[Block] = []
        self.waiting: dict[int, deque[tuple[int, Block]]] = {}
        self.counter = self.ticket = self.done_ticket = 0
        self.allocated = self.requested = self.reserved = self.pending_bytes = 0
        self.peak_allocated = self.peak_reserved = 0
        self.num_allocs = self.num_frees = self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_device_alloc = self.num_device_free = self.num_sync_all_streams = 0
        self.apply(self.settings)

    def apply(self, settings: AllocatorSettings) -> None:
        """Let later requests go by other settings; what is there stays as it is."""
        self.settings = settings
        self._divides = any(settings.divisions)
        self._searches_plainly = settings.max_split_size is None and not settings.expandable
        self.collects = self.cap is not None and settings.gc_threshold > 0
        self.max_split = settings.max_split_size

    # --- requests ---------------------------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of a block for `size` bytes; 0 for no bytes.

        Raises:
            SimulatedOutOfMemoryError: the device has no room, even after everything cached went back to it.
        """
        if size <= 0:
            return self._no_bytes(size)
        if self.waiting:
            reclaim.process_events(self)
        rounded = round_size(size, self.settings.divisions) if self._divides or size < 512 else (size + 511) & -512
        owner = self.pools.get(pool) or self.create_pool(pool)
        half = owner.large if rounded > SMALL_MAX else owner.small
        half.searches += self.collects
        free = half.by_stream.get(stream) or half.of(stream)
        index = bisect_left(free.keys, rounded << SIZE_SHIFT)
        blocks = free.blocks
        if index < len(blocks) and (
            (self._searches_plainly and blocks[index].range is None)
            or (index := acquire.choose(self, free, index, rounded)) >= 0
        ):
            block = blocks.pop(index)
            del free.keys[index]
        else:
            block = acquire.from_driver(self, half, free, rounded)
        if block.size != rounded:
            block = self._split(block, rounded)
        block.state = LIVE
        block.requested = size
        self.num_allocs += 1
        self.requested += size
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        address = block.address
        self.live[address] = block
        self.events.append(("alloc", address, size, stream))
        return address

    def _no_bytes(self, size: int) -> int:
        if size < 0:
            raise ModelError(f"a request of {size} bytes cannot be.")
        return 0

    def _split(self, block: Block, rounded: int) -> Block:
        """Return the block that serves the request: the front of `block`, whose rest becomes free; or all of it."""
        rest = block.size - rounded
        home = block.home
        pool = home.pool
        if pool.is_small or self.settings.expandable:
            if rest < 512:
                return block
        elif rest <= SMALL_MAX or (self.max_split is not None and rounded >= self.max_split):
            return block
        if not pool.owner.is_split:
            return block
        rank = block.rank if self.tie != "block" else self.next_rank()
        front = Block(block.address, rounded, home, block.range, rank, LIVE)
        prev = block.prev
        front.prev, front.next = prev, block
        if prev is not None:
            prev.next = front
        block.prev = front
        block.address += rounded
        block.size = rest
        home.add(block)
        return front

    def free(self, address: int) -> None:
        """Free the block at `address`; 0 does nothing. Raises ModelError where no block was handed out there."""
        block = self.live.pop(address, None)
        if block is None:
            if address == 0:
                return
            raise ModelError(f"no block is allocated at address {address}.")
        requested = block.requested
        stream = block.home.stream
        self.num_frees += 1
        self.allocated -= block.size
        if block.streams is not None:
            self.events.append(("free_requested", address, requested, stream))
            reclaim.defer(self, block)
            return
        self.requested -= requested
        self.events += (("free_requested", address, requested, stream), ("free_completed", address, requested, stream))
        self.put_back(block)

    def put_back(self, block: Block) -> None:
        """Make a block free and merge it with free neighbours."""
        home = block.home
        keys = home.keys
        blocks = home.blocks
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE:
                index = bisect_left(keys, (neighbour.size << SIZE_SHIFT) + neighbour.rank + (neighbour.address >> 9))
                del keys[index]
                del blocks[index]
                block.swallow(neighbour)
        block.state = FREE
        block.born = home.pool.searches
        key = (block.size << SIZE_SHIFT) + block.rank + (block.address >> 9)
        index = bisect_left(keys, key)
        keys.insert(index, key)
        blocks.insert(index, block)

    def record_stream(self, address: int, stream: int) -> None:
        """Say that `stream` uses the block at `address` too: once freed, it waits until that stream is done."""
        block = self.live.get(address)
        if block is None:
            raise ModelError(f"no block is allocated at address {address}.")
        if stream != block.home.stream:
            block.streams = (block.streams or set()) | {stream}

    def complete_events(self) -> None:
        """All that streams had to do until now is done; the blocks that waited are free at the next request."""
        self.done_ticket = self.ticket

    def empty_cache(self, pool: PoolId = DEFAULT_POOL) -> None:
        """Give back to the driver what can go back; of one private pool only, where it is named."""
        reclaim.release_cached(self, pool)

    # --- pools ------------------------------------------------------------------------------------------------------------

    def create_pool(self, pool: PoolId, *, no_split: bool = False, use_on_oom: bool = False) -> PrivatePool:
        """Make a private pool: of CUDA graphs (n, 0) or a MemPool (0, n), in use until `release_pool`."""
        owner = self.pools[pool] = PrivatePool(pool, is_split=not no_split, on_oom=use_on_oom)
        return owner

    def release_pool(self, pool: PoolId) -> None:
        """Say that no graph or MemPool needs a private pool any more: what is free in it can go back to the driver."""
        if pool == DEFAULT_POOL or pool not in self.pools:
            raise ModelError(f"there is no private pool {pool}.")
        self.pools[pool].is_in_use = False

    def next_rank(self) -> int:
        """Return the place of a new block or segment among those of equal size; 0 where addresses decide."""
        if self.tie == "address":
            return 0
        self.counter += 1
        return self.counter << COUNTER_SHIFT

    # --- what is there ----------------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Bytes handed out, and freed ones that wait for a stream."""
        return self.allocated + self.pending_bytes

    def segments(self) -> list[Json]:
        """Return all segments with their blocks by address, in the form of `torch.cuda.memory_snapshot()`."""
        return segments_of(self)

    def stats(self) -> dict[str, Any]:
        """Return current figures and counters, by the names of `torch.cuda.memory_stats()`."""
        return {
            "allocation.all.current": self.num_allocs - self.num_frees,
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak_allocated,
            "active_bytes.all.current": self.active,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "requested_bytes.all.current": self.requested,
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "num_oom_rejections": self.num_oom_rejections,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "num_sync_all_streams": self.num_sync_all_streams,
        }
