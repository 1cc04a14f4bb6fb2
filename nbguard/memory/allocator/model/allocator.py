"""A model of PyTorch's caching allocator on one device, which makes exactly PyTorch's decisions for a program's requests.

The methods follow `DeviceCachingAllocator` in PyTorch's `c10/cuda/CUDACachingAllocator.cpp`; where a method has a counterpart
there, its docstring names it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any

from nbguard.errors import ModelError, SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.blocks import (
    COUNTER_SHIFT,
    FREE,
    LIVE,
    PENDING,
    SIZE_SHIFT,
    UNMAPPED,
    BlockPool,
    FreeSet,
    Json,
    ModelBlock,
    PrivatePool,
    segments_of,
)
from nbguard.memory.allocator.model.driver import Driver, Range, SimulatedDriver
from nbguard.memory.allocator.model.settings import (
    DEFAULT_POOL,
    MIN_BLOCK,
    NEWEST,
    SMALL_MAX,
    SMALL_SEGMENT,
    AllocatorSettings,
    PoolId,
    parse_version,
    range_size,
    round_size,
    segment_size,
    tie_break,
)

Event = tuple[str, int, int, int]
"""(action, address, bytes, stream) as in a snapshot's `device_traces`; the second of an `oom` is the device's free bytes."""


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        settings: the meaning of `PYTORCH_ALLOC_CONF`.
        capacity: bytes of the device; None for a device without end.
        fraction: the share of the device that this process may take (`set_per_process_memory_fraction`); None or 1 for no
            limit.
        torch_version: decides where versions differ, such as which of two free blocks of one size is taken.
        driver: gives and takes memory; by default a `SimulatedDriver` that counts to `capacity` and makes up addresses.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        fraction: float | None = None,
        torch_version: str = f"{NEWEST[0]}.{NEWEST[1]}",
        driver: Driver | None = None,
    ) -> None:
        self.settings: AllocatorSettings = settings or AllocatorSettings()
        self.capacity = capacity
        self.torch_version = torch_version
        self.fraction: float | None = fraction if fraction is not None else self.settings.fraction
        self.driver: Driver = driver or SimulatedDriver(capacity)
        self.tie = tie_break(parse_version(torch_version))
        self.cap: int | None = (
            int(self.fraction * capacity) if self.fraction and self.fraction < 1 and capacity is not None else None
        )
        """Bytes that this process may reserve, by `fraction`; None for no limit."""
        self.events: list[Event] = []
        """The history, oldest first, as `device_traces` has it; a reader may empty the list."""
        self.events_are_instant = True
        """Whether the work of other streams is done at the next request; if not, `complete_events()` says when it is."""
        self.pools: dict[PoolId, PrivatePool] = {DEFAULT_POOL: PrivatePool(DEFAULT_POOL)}
        self.live: dict[int, ModelBlock] = {}
        """Blocks in use, by address."""
        self.pending: list[ModelBlock] = []
        """Freed blocks that wait for other streams."""
        self.waiting: dict[int, deque[tuple[int, ModelBlock]]] = {}
        """By stream, the events that freed blocks wait for: (ticket, block), oldest first (torch's `cuda_events`)."""
        self.counter = self.ticket = self.done_ticket = 0
        """The blocks or segments numbered so far; the last ticket given to an event; the last ticket that is done."""
        self.allocated = self.requested = self.reserved = self.pending_bytes = 0
        """Bytes; torch's `allocated_bytes`, `requested_bytes` and `reserved_bytes.all.current`, and the bytes of `pending`."""
        self.allocated_so_far: int = 0
        """Bytes of all blocks that were ever handed out; torch's `allocated_bytes.all.allocated`."""
        self.peak_allocated = self.peak_reserved = 0
        """Bytes; torch's `allocated_bytes.all.peak` and `reserved_bytes.all.peak`."""
        self.num_allocs = self.num_frees = self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_device_alloc = self.num_device_free = self.num_sync_all_streams = 0
        """Counts, by the names of `torch.cuda.memory_stats()`."""
        self.apply(self.settings)

    def apply(self, settings: AllocatorSettings) -> None:
        """Let later requests go by other settings; blocks and segments stay as they are."""
        self.settings = settings
        self._divides = any(settings.divisions)
        self._searches_plainly = settings.max_split_size is None and not settings.expandable
        self.collects = self.cap is not None and settings.gc_threshold > 0
        self.max_split = settings.max_split_size

    # --- requests ---------------------------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0, pool: PoolId = DEFAULT_POOL) -> int:
        """Return the address of a block for `size` bytes; 0 for no bytes (`malloc`).

        Raises:
            SimulatedOutOfMemoryError: the device has no room, even after everything cached went back to it.
        """
        if size <= 0:
            return self._no_bytes(size)
        if self.waiting:
            self._process_events()
        rounded = round_size(size, self.settings.divisions) if self._divides or size < 512 else (size + 511) & -512
        owner = self.pools.get(pool) or self.create_pool(pool)
        half = owner.large if rounded > SMALL_MAX else owner.small
        half.searches += self.collects
        free = half.by_stream.get(stream) or half.of(stream)
        index = bisect_left(free.keys, rounded << SIZE_SHIFT)
        blocks = free.blocks
        if index < len(blocks) and (
            (self._searches_plainly and blocks[index].range is None) or (index := self.choose(free, index, rounded)) >= 0
        ):
            block = blocks.pop(index)
            del free.keys[index]
        else:
            block = self._from_driver(half, free, rounded)
        if block.size != rounded:
            block = self._split(block, rounded)
        block.state = LIVE
        block.requested = size
        self.num_allocs += 1
        self.requested += size
        self.allocated += block.size
        self.allocated_so_far += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        address = block.address
        self.live[address] = block
        self.events.append(("alloc", address, size, stream))
        return address

    def _no_bytes(self, size: int) -> int:
        if size < 0:
            raise ModelError(f"a request of {size} bytes is not possible.")
        return 0

    def _split(self, block: ModelBlock, rounded: int) -> ModelBlock:
        """Return the front of `block` and make the rest of it free; the whole block where PyTorch would not split it.

        The counterpart is `should_split`, with the second half of `alloc_found_block`.
        """
        rest = block.size - rounded
        home = block.home
        pool = home.pool
        if pool.is_small or self.settings.expandable:
            if rest < MIN_BLOCK:
                return block
        elif rest <= SMALL_MAX or (self.max_split is not None and rounded >= self.max_split):
            return block
        if not pool.owner.is_split:
            return block
        rank = block.rank if self.tie != "block" else self.next_rank()
        front = ModelBlock(block.address, rounded, home, block.range, rank, LIVE)
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
        """Free the block at `address`; 0 does nothing.

        Raises:
            ModelError: no block is in use at that address.
        """
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
            self._defer(block)
            return
        self.requested -= requested
        self.events += (("free_requested", address, requested, stream), ("free_completed", address, requested, stream))
        self.put_back(block)

    def put_back(self, block: ModelBlock) -> None:
        """Make a block free and merge it with free neighbours (`free_block`)."""
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
        """Record that `stream` uses the block at `address` too: once freed, the block waits until that stream is done."""
        block = self.live.get(address)
        if block is None:
            raise ModelError(f"no block is allocated at address {address}.")
        if stream != block.home.stream:
            block.streams = (block.streams or set()) | {stream}

    def complete_events(self) -> None:
        """Mark all work that streams have so far as done: the blocks that waited for it are free at the next request."""
        self.done_ticket = self.ticket

    # --- the search, and memory from the driver ---------------------------------------------------------------------------

    def choose(self, free: FreeSet, index: int, rounded: int) -> int:
        """Return the index of the free block that serves a request, or -1 if there is none (`get_free_block`).

        PyTorch considers one candidate only: where that is refused, the search does not go on to the next.

        Args:
            free: the set that is searched.
            index: of the smallest block that is large enough.
            rounded: bytes of the request, rounded.
        """
        settings, blocks = self.settings, free.blocks
        if blocks[index].range is not None:
            if settings.expandable:
                while (
                    blocks[index].range is not None
                    and index + 1 < len(blocks)
                    and blocks[index + 1].growable_size < blocks[index].growable_size
                ):
                    index += 1
            else:
                index = next((i for i in range(index + 1, len(blocks)) if blocks[i].range is None), -1)
                if index < 0:
                    return -1
        limit = settings.max_split_size
        if limit is not None:
            size = blocks[index].size
            if rounded < limit <= size:
                return -1
            rounding = settings.max_non_split_rounding or settings.large_segment
            if rounded >= limit and size >= rounded + rounding:
                return -1
        return index

    def _from_driver(self, pool: BlockPool, free: FreeSet, rounded: int) -> ModelBlock:
        """Return a block of new memory, after giving back as much cached memory as needed.

        Raises:
            SimulatedOutOfMemoryError: the device has no room, even after everything cached went back to it.
        """
        if self.collects:
            self._collect_garbage()
        if (block := self._new_segment(pool, free, rounded)) is not None:
            return block
        if self._is_rejected(rounded):
            self.num_oom_rejections += 1
            raise SimulatedOutOfMemoryError(rounded, self.driver.free())
        if pool.owner.id == DEFAULT_POOL and (block := self._from_pools_on_oom(pool, free.stream, rounded)) is not None:
            return block
        if self._release_available(free, rounded) and (block := self._new_segment(pool, free, rounded)):
            return block
        self.empty_cache()
        self.num_alloc_retries += 1
        if (block := self._new_segment(pool, free, rounded)) is not None:
            return block
        left = self.driver.free()
        self.events.append(("oom", left or 0, rounded, free.stream))
        self.num_ooms += 1
        raise SimulatedOutOfMemoryError(rounded, left)

    def _new_segment(self, pool: BlockPool, free: FreeSet, rounded: int) -> ModelBlock | None:
        """Return a block of new memory; None where the limit or the device does not allow it (`alloc_block`)."""
        settings = self.settings
        size = segment_size(rounded, settings.large_segment)
        if self.cap is not None and self.reserved + size > self.cap:
            return None
        if settings.expandable:
            block = self._expand(pool, free, rounded)
            if block is not None:
                pool.owner.segments += 1
            return block
        address = self.driver.allocate(size)
        if address is None:
            return None
        self.num_device_alloc += 1
        pool.owner.segments += 1
        self.grow(size)
        self.events.append(("segment_alloc", address, size, free.stream))
        return ModelBlock(address, size, free, None, self.next_rank(), LIVE)

    def grow(self, size: int) -> None:
        """Count `size` bytes more as reserved."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _is_rejected(self, rounded: int) -> bool:
        """Return whether `throw_on_cudamalloc_oom` refuses the request at once, with nothing given back first."""
        settings = self.settings
        if not settings.throw_on_oom or settings.fraction is None or self.capacity is None:
            return False
        size = segment_size(rounded, settings.large_segment)
        return self.reserved + size > int(settings.fraction * self.capacity)

    def _from_pools_on_oom(self, pool: BlockPool, stream: int, rounded: int) -> ModelBlock | None:
        """Return a free block of a MemPool that may serve others in need (`use_on_oom`); None where none fits."""
        for owner in self.pools.values():
            if not (owner.on_oom and owner.is_in_use):
                continue
            half = owner.small if pool.is_small else owner.large
            half.searches += self.collects
            free = half.of(stream)
            index = free.first(rounded)
            if index < len(free.keys) and (index := self.choose(free, index, rounded)) >= 0:
                del free.keys[index]
                return free.blocks.pop(index)
        return None

    # --- expandable segments ----------------------------------------------------------------------------------------------

    def _expand(self, pool: BlockPool, free: FreeSet, rounded: int) -> ModelBlock | None:
        """Return a block of at least `rounded` bytes at the front of free or newly mapped space; None if mapping fails.

        The counterpart is `try_allocate_expandable_block`.
        Pages that were mapped before another one failed stay mapped, and free.
        """
        block = self._expandable_candidate(pool, free, rounded)
        if block.state == UNMAPPED and not self.map_pages(block, min(block.size, rounded)):
            return None
        while block.size < rounded:
            following = block.next
            if following is None or following.state != UNMAPPED:
                return None  # a request larger than the address space of the device
            if not self.map_pages(following, min(rounded - block.size, following.size)):
                return None
            block = following
        free.remove(block)
        block.state = LIVE
        return block

    def _expandable_candidate(self, pool: BlockPool, free: FreeSet, rounded: int) -> ModelBlock:
        """Return the lowest block that starts a long enough span of free and unmapped blocks, or the block of a new range.

        The counterpart is `find_expandable_block`.
        """
        for unmapped in free.unmapped:
            before = unmapped.prev
            start = before if before is not None and before.state == FREE else unmapped
            span = 0
            block: ModelBlock | None = start
            while span < rounded and block is not None and block.state in (FREE, UNMAPPED):
                span += block.size
                block = block.next
            if span >= rounded:
                return start
        page = SMALL_SEGMENT if pool.is_small else self.settings.large_segment
        size = range_size(self.capacity, page)
        rank = self.next_rank()
        space = Range(self.driver.reserve(size), size, page, rank >> COUNTER_SHIFT)
        whole = ModelBlock(space.base, size, free, space, rank, UNMAPPED)
        free.add_unmapped(whole)
        return whole

    def map_pages(self, block: ModelBlock, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages, and merge it with free neighbours.

        The counterpart is `map_block`. Returns False, with nothing changed, where the driver has no memory.
        """
        space, free = block.range, block.home
        assert space is not None
        size = -(-size // space.page) * space.page
        if not self.driver.map(block.address, size):
            return False
        address = block.address
        free.remove_unmapped(block)
        if size < block.size:
            rest = ModelBlock(address + size, block.size - size, free, space, self._rank_of_piece(block), UNMAPPED)
            rest.put_after(block)
            free.add_unmapped(rest)
            block.size = size
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE:
                free.remove(neighbour)
                block.swallow(neighbour)
        free.add(block)
        self.num_device_alloc += 1
        self.grow(size)
        self.events.append(("segment_map", address, size, free.stream))
        return True

    def unmap_pages(self, block: ModelBlock) -> None:
        """Give back the whole pages inside a free block; the bytes before and behind them stay free (`unmap_block`)."""
        space, free = block.range, block.home
        assert space is not None
        first, last = block.whole_pages()
        if last <= first:
            return
        self.driver.unmap(first, last - first)
        free.remove(block)
        if first > block.address:
            head = ModelBlock(block.address, first - block.address, free, space, self._rank_of_piece(block), FREE)
            head.put_before(block)
            free.add(head)
        if block.address + block.size > last:
            tail = ModelBlock(last, block.address + block.size - last, free, space, self._rank_of_piece(block), FREE)
            tail.put_after(block)
            free.add(tail)
        block.address, block.size = first, last - first
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == UNMAPPED:
                free.remove_unmapped(neighbour)
                block.swallow(neighbour)
        free.add_unmapped(block)
        free.pool.owner.segments -= 1
        self.num_device_free += 1
        self.reserved -= last - first
        self.events.append(("segment_unmap", first, last - first, free.stream))
        if not block.is_split:
            free.remove_unmapped(block)
            self.driver.unreserve(space.base, space.size)

    def _rank_of_piece(self, block: ModelBlock) -> int:
        """Return the rank of a piece of `block`: a new one where block objects are counted, else the rank of its range."""
        return self.next_rank() if self.tie == "block" else block.rank

    # --- memory given back ------------------------------------------------------------------------------------------------

    def _defer(self, block: ModelBlock) -> None:
        """Let a freed block wait for the streams that used it: one event on each (`insert_events`)."""
        streams, block.streams = block.streams or set(), None
        block.state = PENDING
        block.waits = len(streams)
        self.pending.append(block)
        self.pending_bytes += block.size
        self.ticket += 1
        for stream in sorted(streams):
            self.waiting.setdefault(stream, deque()).append((self.ticket, block))

    def _process_events(self, *, synchronize: bool = False) -> None:
        """Free the blocks whose events are done, stream by stream, up to the first event that is not (`process_events`).

        PyTorch takes the streams in the order of a hash table, which nothing in a snapshot shows; the model begins with the
        stream that has waited longest. A replay takes the order from the trace.

        Args:
            synchronize: wait for all events (`synchronize_and_free_events`).
        """
        done = self.ticket if synchronize or self.events_are_instant else self.done_ticket
        for stream, queue in list(self.waiting.items()):
            while queue and queue[0][0] <= done:
                _, block = queue.popleft()
                block.waits -= 1
                if not block.waits:
                    self.complete_free(block)
            if not queue:
                del self.waiting[stream]

    def _synchronize_pool(self, pool: PoolId) -> None:
        """Wait for the streams that used blocks of a private pool, unless the pool is in use."""
        owner = self.pools.get(pool)
        if owner is None or owner.is_in_use:
            return
        blocks = [block for block in self.pending if block.home.pool.owner is owner]
        for stream, queue in list(self.waiting.items()):
            left = deque(entry for entry in queue if entry[1].home.pool.owner is not owner)
            if left:
                self.waiting[stream] = left
            else:
                del self.waiting[stream]
        for block in blocks:
            self.complete_free(block)

    def complete_free(self, block: ModelBlock) -> None:
        """Make a pending block free."""
        self.pending.remove(block)
        block.waits = 0
        self.pending_bytes -= block.size
        self.requested -= block.requested
        self.events.append(("free_completed", block.address, block.requested, block.home.stream))
        self.put_back(block)

    def empty_cache(self, pool: PoolId = DEFAULT_POOL) -> None:
        """Give all cached memory back: whole free segments, and whole free pages of expandable ones (`release_cached_blocks`).

        Args:
            pool: everybody's, with every private pool that is no longer in use; or one private pool by itself.
        """
        if pool == DEFAULT_POOL:
            self._process_events(synchronize=True)
            self.num_sync_all_streams += 1
            default = self.pools[DEFAULT_POOL]
            self._release_blocks(default.large)
            self._release_blocks(default.small)
        else:
            self._synchronize_pool(pool)
        for owner in list(self.pools.values()):
            if owner.is_in_use or (pool not in (DEFAULT_POOL, owner.id)):
                continue
            self._release_blocks(owner.small)
            self._release_blocks(owner.large)
            if not owner.segments:
                del self.pools[owner.id]

    def would_release(self, pool: PoolId = DEFAULT_POOL) -> list[tuple[str, int, int, int]]:
        """Return the events that `empty_cache` would cause, and change nothing; pending blocks are left out."""
        default = self.pools[DEFAULT_POOL]
        halves = [default.large, default.small] if pool == DEFAULT_POOL else []
        for owner in self.pools.values():
            if not owner.is_in_use and pool in (DEFAULT_POOL, owner.id):
                halves += [owner.small, owner.large]
        events: list[tuple[str, int, int, int]] = []
        for half in halves:
            sets = list(half.in_order())
            events += [
                ("segment_free", block.address, block.size, free.stream)
                for free in sets
                for block in free.blocks
                if block.range is None and not block.is_split
            ]
            for free in sets:
                pages = [block.whole_pages() for block in free.blocks if block.range is not None]
                events += [("segment_unmap", first, last - first, free.stream) for first, last in pages if last > first]
        return events

    def _release_blocks(self, pool: BlockPool) -> None:
        """Give back the free memory of one size class: all whole segments first, then pages (`release_blocks`)."""
        stretches: list[ModelBlock] = []
        for free in pool.in_order():
            whole = [block for block in free.blocks if block.range is None and not block.is_split]
            stretches += [block for block in free.blocks if block.range is not None]
            for block in whole:
                self.release_segment(block)
        for block in stretches:
            self.unmap_pages(block)

    def release_segment(self, block: ModelBlock) -> None:
        """Give a segment that is one free block back to the driver (`release_block`)."""
        block.home.remove(block)
        block.home.pool.owner.segments -= 1
        self.driver.release(block.address, block.size)
        self.num_device_free += 1
        self.reserved -= block.size
        self.events.append(("segment_free", block.address, block.size, block.home.stream))

    def _release_available(self, free: FreeSet, rounded: int) -> bool:
        """Give back just enough blocks above the split limit; return whether that was enough for the request.

        The counterpart is `release_available_cached_blocks`.
        """
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(rounded, limit)
        index = free.first(wanted)
        if index < len(free.blocks) and free.blocks[index].range is None:
            self.release_segment(free.blocks[index])
            return True
        released = 0
        for block in reversed(free.blocks[:index]):
            if released >= wanted or block.size < limit:
                break
            if block.range is None:
                released += block.size
                self.release_segment(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back the segments unused for longer than the average, once more than the threshold is reserved.

        Rounds go on until the bytes above the threshold are back. Only the default pool's large blocks count. The counterpart
        is `garbage_collect_cached_blocks`.
        """
        assert self.cap is not None
        limit = int(self.settings.gc_threshold * self.cap)
        if self.reserved <= limit:
            return
        target = self.reserved - limit
        pool = self.pools[DEFAULT_POOL].large
        unsplit = [block for free in pool.in_order() for block in free.blocks if not block.is_split]
        total, count = sum(pool.searches - block.born for block in unsplit), len(unsplit)
        candidates = [block for block in unsplit if block.range is None]
        reclaimed = 0
        while reclaimed < target and count:
            average = total / count
            old = [block for block in candidates if pool.searches - block.born >= average]
            # The average is that at the round's start; a released segment no longer counts in the next round.
            for block in old:
                reclaimed += block.size
                total -= pool.searches - block.born
                count -= 1
                self.release_segment(block)
            if not old:
                return
            candidates = [block for block in candidates if pool.searches - block.born < average]

    # --- pools ------------------------------------------------------------------------------------------------------------

    def create_pool(self, pool: PoolId, *, no_split: bool = False, use_on_oom: bool = False) -> PrivatePool:
        """Make a private pool, of CUDA graphs (n, 0) or of a MemPool (0, n), in use until `release_pool`."""
        owner = self.pools[pool] = PrivatePool(pool, is_split=not no_split, on_oom=use_on_oom)
        return owner

    def release_pool(self, pool: PoolId) -> None:
        """End the use of a private pool by its graph or MemPool: its free memory can go back to the driver.

        Raises:
            ModelError: there is no such private pool.
        """
        if pool == DEFAULT_POOL or pool not in self.pools:
            raise ModelError(f"there is no private pool {pool}.")
        self.pools[pool].is_in_use = False

    def next_rank(self) -> int:
        """Return the rank of a new block or segment among free blocks of equal size; 0 where addresses decide."""
        if self.tie == "address":
            return 0
        self.counter += 1
        return self.counter << COUNTER_SHIFT

    # --- contents ---------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Bytes in blocks in use and in pending ones (torch's `active_bytes.all.current`)."""
        return self.allocated + self.pending_bytes

    def free_sets(self) -> list[FreeSet]:
        """Return the sets of free blocks of every pool, size class and stream."""
        return [free for owner in self.pools.values() for half in owner.halves for free in half.by_stream.values()]

    def blocks(self) -> list[ModelBlock]:
        """Return every block that has memory, by address."""
        free = [block for free_set in self.free_sets() for block in free_set.blocks]
        return sorted([*self.live.values(), *self.pending, *free], key=lambda block: block.address)

    def segments(self) -> list[Json]:
        """Return all segments with their blocks by address, in the form of `torch.cuda.memory_snapshot()`."""
        return segments_of(self.blocks())

    def stats(self) -> dict[str, Any]:
        """Return current figures and counters, by the names of `torch.cuda.memory_stats()`."""
        return {
            "allocation.all.current": self.num_allocs - self.num_frees,
            "allocation.all.allocated": self.num_allocs,
            "allocated_bytes.all.allocated": self.allocated_so_far,
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
