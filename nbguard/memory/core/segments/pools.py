"""The allocator's pools by name, their owners, how much of each is free, and whether it can be given back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

from nbguard.memory.core.advice import NONE, Advice, release_names, release_stale
from nbguard.memory.core.facts import DeviceFacts, Facts, Graph, PoolFact, PoolId, Segment
from nbguard.memory.core.finding import Finding, least_shown
from nbguard.memory.core.references.graph import STALE_KINDS, path_text, reach_of_roots, shortest_path
from nbguard.memory.core.references.releases import release_of_way
from nbguard.memory.core.segments.fragmentation import Fragmentation, PoolKey, by_pool, fragmentation, left_in_segments
from nbguard.units import format_bytes

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
