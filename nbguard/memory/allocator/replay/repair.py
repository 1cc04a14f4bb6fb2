"""Repair of a replay that parts from its trace, with corrections of the start, the driver's answers and retries."""

from __future__ import annotations

from bisect import bisect_right

from nbguard.errors import SimulatedOutOfMemoryError
from nbguard.memory.allocator.model.allocator import CachingAllocator
from nbguard.memory.allocator.model.blocks import FREE, LIVE, UNMAPPED, FreeSet, ModelBlock
from nbguard.memory.allocator.model.driver import SimulatedDriver
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, MIN_BLOCK, SMALL_MAX, PoolId, round_size, segment_size
from nbguard.memory.allocator.model.state import copy
from nbguard.memory.allocator.replay.start import StartAssumptions, StartCorrections, prefer
from nbguard.memory.allocator.snapshot.snapshot import Event

# --- A driver that answers as the recorded one did; the trace shows whether there was room, and at which address.


NOWHERE = 1 << 55
"""From here on lie the addresses of memory that the model asks for and the recorded program did not."""


class TraceDriver:
    """A driver whose answers are taken from the events of a trace."""

    def __init__(self, events: tuple[Event, ...], done: list[Event]) -> None:
        self.events = events  # of the whole trace
        self.done = done  # the model's events of the running call so far
        self.position = 0  # in `events`, of the first event of the running call
        self.fresh: int | None = None  # address of a range reserved before memory goes back for the same request, if known
        self._nowhere = NOWHERE

    def _expected(self) -> Event:
        index = self.position + len(self.done)
        return self.events[index] if index < len(self.events) else ("end", 0, 0, 0)

    def allocate(self, size: int) -> int | None:  # noqa: D102
        action, address, recorded, _ = self._expected()
        if action == "segment_alloc" and recorded == size:
            return address
        return None if _is_refusal(action) else self._elsewhere(size)

    def release(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def reserve(self, size: int) -> int:  # noqa: D102
        action, address, _, _ = self._expected()
        if action == "segment_map":
            return address
        place, self.fresh = self.fresh, None
        return self._elsewhere(size) if place is None or not _is_refusal(action) else place

    def unreserve(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002, D102
        return not _is_refusal(self._expected()[0])

    def unmap(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def free(self) -> int | None:  # noqa: D102
        action, address, _, _ = self._expected()
        return address if action == "oom" else None

    def _elsewhere(self, size: int) -> int:
        address = self._nowhere
        self._nowhere += -(-size // 2**21) * 2**21
        return address


def _is_refusal(action: str) -> bool:
    """Return whether an action shows, as the next event of a request, that the driver had no room."""
    return action in ("segment_free", "segment_unmap", "oom")


def undo(model: CachingAllocator, address: int, peaks: tuple[int, int]) -> ModelBlock:
    """Undo the request that was just served at `address`; return the free block that it leaves."""
    block = model.live[address]
    if block.next is not None and block.next.state == FREE:
        block.rank = block.next.rank  # of both, the rest is the block that there was before
    model.free(address)
    model.num_allocs -= 1
    model.num_frees -= 1
    model.peak_allocated, model.peak_reserved = peaks
    return block


def free_at(free: FreeSet, address: int) -> ModelBlock | None:
    """Return the free block around an address."""
    return next((block for block in free.blocks if block.address <= address < block.address + block.size), None)


def set_of(model: CachingAllocator, size: int, stream: int, pool: PoolId) -> tuple[FreeSet, int]:
    """Return the set that a request is searched in, and its rounded size."""
    rounded = round_size(size, model.settings.divisions)
    owner = model.pools.get(pool) or model.create_pool(pool)
    return (owner.large if rounded > SMALL_MAX else owner.small).of(stream), rounded


def pool_around(model: CachingAllocator, address: int) -> PoolId:
    """Return the pool that has a free block around an address; the default pool where none has."""
    for owner in model.pools.values():
        sets = [free for half in (owner.small, owner.large) for free in half.by_stream.values()]
        if any(free_at(free, address) is not None for free in sets):
            return owner.id
    return DEFAULT_POOL


def private_pools_of(model: CachingAllocator, run: list[Event]) -> list[PoolId]:
    """Return the private pools that gave memory back in a run of releases, and end their use."""
    places = {event[1] for event in run}
    released = []
    for owner in model.pools.values():
        sets = [free for half in (owner.small, owner.large) for free in half.by_stream.values()]
        if owner.id != DEFAULT_POOL and any(block.address in places for free in sets for block in free.blocks):
            owner.is_in_use = False
            released.append(owner.id)
    return released


def finds(model: CachingAllocator, event: Event, pool: PoolId) -> ModelBlock | None:
    """Return the free block that would serve a request; None where the driver would be asked."""
    free, rounded = set_of(model, event[2], event[3], pool)
    index = free.first(rounded)
    index = model.choose(free, index, rounded) if index < len(free.keys) else -1
    return free.blocks[index] if index >= 0 else None


# --- learning ---------------------------------------------------------------------------------------------------------------


def learn(
    model: CachingAllocator,
    assumptions: StartAssumptions,
    corrections: StartCorrections,
    chosen: ModelBlock,
    wanted_at: int,
    event: Event,
    pool: PoolId,
) -> bool:
    """Change assumptions on the start so that a request is served at its recorded address; return whether that is possible.

    Args:
        model: before the request.
        assumptions: on the state at the start, which may be changed.
        corrections: receives the change, for the next pass from the start.
        chosen: the free block that the model took.
        wanted_at: the address that the recorded allocator took.
        event: the request.
        pool: its pool.
    """
    free, rounded = set_of(model, event[2], event[3], pool)
    wanted = free_at(free, wanted_at)
    if wanted is None:
        return False
    if wanted.address < wanted_at:
        return _extend(model, assumptions, corrections, wanted, wanted_at - wanted.address)
    if wanted is chosen or chosen.home is not free or chosen.state != FREE:
        return False
    if wanted.size == chosen.size:
        return prefer(model, assumptions, corrections, wanted)
    # The smaller of the two was refused: it must be smaller still than the request.
    return wanted.size > chosen.size and _refuse(model, assumptions, corrections, chosen, rounded)


def learn_refusals(
    model: CachingAllocator, assumptions: StartAssumptions, corrections: StartCorrections, event: Event, pool: PoolId
) -> int:
    """Make each free block that would serve a request too small for it, as the recorded allocator went to the driver.

    Return the number of assumptions changed. For the arguments see `learn`.
    """
    rounded = round_size(event[2], model.settings.divisions)
    changed = 0
    while (block := finds(model, event, pool)) is not None and _refuse(model, assumptions, corrections, block, rounded):
        changed += 1
    return changed


def _refuse(
    model: CachingAllocator, assumptions: StartAssumptions, corrections: StartCorrections, free: ModelBlock, rounded: int
) -> bool:
    """Let a free block be just too small for a request, if the block before it may be as much larger."""
    return _extend(model, assumptions, corrections, free, free.size - rounded + MIN_BLOCK)


def _extend(
    model: CachingAllocator, assumptions: StartAssumptions, corrections: StartCorrections, free: ModelBlock, more: int
) -> bool:
    """Make the block before a free one `more` bytes larger, if its size is an assumption: a rest that was not split off."""
    before = free.prev
    if before is None or before.state != LIVE or before.address not in assumptions.sizes or more >= free.size:
        return False
    if before.size + more - round_size(before.requested, model.settings.divisions) > SMALL_MAX:
        return False
    free.home.remove(free)
    free.address += more
    free.size -= more
    before.size += more
    free.home.add(free)
    model.allocated += more
    corrections.sizes[before.address] = before.size
    return True


def adopt_range(free: FreeSet, address: int) -> None:
    """Place an empty range of unknown address where pages are mapped now, if nothing else can lie there."""
    if any(block.address <= address < block.address + block.size for block in free.unmapped):
        return
    for block in free.unmapped:
        if block.address >= NOWHERE and not block.is_split and block.range is not None:
            free.remove_unmapped(block)
            block.address = block.range.base = address
            free.add_unmapped(block)
            return


# --- following --------------------------------------------------------------------------------------------------------------


def follow_request(model: CachingAllocator, events: tuple[Event, ...], pool: PoolId) -> None:
    """Make the model do as the recorded allocator did for one request: `events` are the driver's, then the request's own."""
    action, address, size, stream = events[-1]
    for event in events[:-1]:
        if event[0] in ("segment_free", "segment_unmap"):
            follow_releases(model, (event,))
        else:
            follow_growth(model, event, pool, is_small=round_size(size, model.settings.divisions) <= SMALL_MAX)
    if action != "alloc":
        return
    free, rounded = set_of(model, size, stream, pool)
    block = free_at(free, address)
    if block is None or address + rounded > block.address + block.size:
        return  # unknown memory: its events count as differences
    free.remove(block)
    if address > block.address:
        head = ModelBlock(block.address, address - block.address, free, block.range, block.rank, FREE)
        head.put_before(block)
        free.add(head)
    rest = block.address + block.size - address - rounded
    block.address, block.size = address, rounded + rest
    if rest > (0 if free.pool.is_small or block.range is not None else SMALL_MAX):
        tail = ModelBlock(address + rounded, rest, free, block.range, block.rank, FREE)
        tail.put_after(block)
        free.add(tail)
        block.size = rounded
    block.state, block.requested = LIVE, size
    model.live[address] = block
    model.num_allocs += 1
    model.allocated += block.size
    model.requested += size
    model.peak_allocated = max(model.peak_allocated, model.allocated)


def follow_cut(model: CachingAllocator, events: tuple[Event, ...], pool: PoolId) -> bool:
    """Follow a request that the start of the trace cuts in two; return whether there is one.

    The driver's events for it before the start are not in the trace, so other blocks are free now than at its search.
    """
    fitting = finds(model, events[-1], pool)
    action, address, _, _ = events[-1]
    if action == "alloc" and (events[0][0] == "alloc" or not model.settings.expandable):
        free, rounded = set_of(model, events[-1][2], events[-1][3], pool)
        block = free_at(free, address)
        if len(events) > 1 or block is None or block.address != address or block is fitting:
            return False
        if block.range is None and (block.is_split or block.size != segment_size(rounded, model.settings.large_segment)):
            return False
    elif fitting is None or not _goes_past(model, events, pool):
        return False
    follow_request(model, events, pool)
    return action == "oom" or address in model.live


def _goes_past(model: CachingAllocator, events: tuple[Event, ...], pool: PoolId) -> bool:
    """Return whether a request went past a free block that fits, whether memory went back before it or for it."""
    if events[0][0] in ("segment_free", "segment_unmap"):
        model = copy(model, SimulatedDriver())
        model.empty_cache()
    fitting = finds(model, events[-1], pool)
    return fitting is not None and fitting.address != events[-1][1]


def follow_growth(model: CachingAllocator, event: Event, pool: PoolId, *, is_small: bool | None = None) -> None:
    """Add a segment that the recorded allocator got, free, unless the model has one there."""
    action, address, size, stream = event
    if is_small is None:
        is_small = size <= segment_size(1)
    owner = model.pools.get(pool) or model.create_pool(pool)
    free = (owner.small if is_small else owner.large).of(stream)
    if action == "segment_map":
        stretch = next((block for block in free.unmapped if block.address == address and block.size >= size), None)
        if stretch is not None:
            model.map_pages(stretch, size)
    elif free_at(free, address) is None:
        owner.segments += 1
        model.grow(size)
        free.add(ModelBlock(address, size, free, None, model.next_rank(), FREE))


def follow_releases(model: CachingAllocator, run: tuple[Event, ...]) -> None:
    """Give back the memory of a run of recorded releases, as far as it is free in the model."""
    free = [block for block in model.blocks() if block.state == FREE]
    places = [block.address for block in free]
    for action, address, size, stream in run:
        index = bisect_right(places, address) - 1
        block = free[index] if index >= 0 else None
        if block is None or block.state != FREE or block.home.stream != stream:
            continue
        if action == "segment_free" and (block.address, block.size) == (address, size) and not block.is_split:
            model.release_segment(block)
            block.state = UNMAPPED  # should the run name it twice
        elif action == "segment_unmap" and block.range is not None and block.whole_pages()[0] <= address:
            model.unmap_pages(block)


# --- Detection of retries (whether memory went back within a request or before it), and of the range reserved then.


Events = tuple[Event, ...]
"""The driver's events for a request, then the request's own event."""


def is_retry(model: CachingAllocator, events: Events, released: int, pool: PoolId) -> bool:
    """Return whether memory surely went back within a request, and not before it.

    A request does not search the free blocks again after that. It shows in two cases only: unmapping makes a block that a
    search would have found (before, the block was too large to be split, or free and unmapped blocks together were larger);
    or the first try left an empty range behind, which the second fills.

    Args:
        model: before the request.
        events: of the request.
        released: how many of them give memory back, at the beginning.
        pool: of the request.
    """
    if not model.settings.expandable or finds(model, events[-1], pool) is not None:
        return False
    emptied = copy(model, SimulatedDriver())
    emptied.empty_cache()
    gives = released < len(events) - 1
    if (block := finds(emptied, events[-1], pool)) is not None:
        return gives or block.address != events[-1][1]
    if not gives or _reproduces(emptied, events[released:], pool):
        return False
    return _reproduces(copy(model, SimulatedDriver()), events, pool)


def _reproduces(model: CachingAllocator, events: Events, pool: PoolId) -> bool:
    """Return whether a copy of the model reproduces the events of a request."""
    model.events.clear()
    model.driver = driver = TraceDriver(events, model.events)
    place_range(model, driver, events, pool)
    try:
        model.malloc(events[-1][2], events[-1][3], pool)
    except SimulatedOutOfMemoryError:
        return False
    return tuple(model.events) == events


def place_range(model: CachingAllocator, driver: TraceDriver, events: Events, pool: PoolId) -> None:
    """Place a range of unknown address where a request first maps pages, if nothing else can lie there."""
    driver.fresh = None
    mapped = next((event[1] for event in events if event[0] == "segment_map"), None)
    if mapped is None:
        return
    if events[0][0] == "segment_map":
        adopt_range(set_of(model, events[-1][2], events[-1][3], pool)[0], mapped)
    elif not _is_in_range(model, mapped):
        driver.fresh = mapped


def _is_in_range(model: CachingAllocator, address: int) -> bool:
    """Return whether an address lies in an expandable segment, mapped or not."""
    unmapped = [block for free in model.free_sets() for block in free.unmapped]
    return any(
        block.range is not None and block.range.base <= address < block.range.base + block.range.size
        for block in (*model.blocks(), *unmapped)
    )
