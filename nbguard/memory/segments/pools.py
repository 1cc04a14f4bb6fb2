"""The allocator's pools by name: how much of each is free, and whether it can be given back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from nbguard.memory.facts import DeviceFacts, Facts, Graph, PoolFact, PoolId
from nbguard.memory.references.graph import STALE_KINDS, path_text, shortest_path
from nbguard.memory.segments.fragmentation import Fragmentation, PoolKey, by_pool, fragmentation, left_in_segments


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool of a device in the words of the user, with its bytes. The pools of a device add up to the bytes reserved."""

    name: str
    space: Fragmentation


def pools_in_use(facts: Facts, alive: Set[int] | None = None) -> frozenset[PoolId]:
    """Return the private pools that an object keeps in use (one of the nodes `alive`, if given)."""
    return frozenset(pool.pool for pool in facts.pools if alive is None or not alive.isdisjoint(pool.keepers))


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
    """What `empty_cache` does on all devices once some storages are free, in bytes."""

    released: int  # go back to the device, cached memory that was free before included
    stranded: int  # of what is freed stay with PyTorch: other blocks live in their segments (or pages), or pools are in use


def given_back(
    facts: Facts, storages: Iterable[int], in_use: Collection[PoolId], blocks: Mapping[str, Set[int]] | None = None
) -> GivenBack | None:
    """Return what `empty_cache` gives back of all devices once `storages` are free; None without segments.

    `in_use` are the private pools that something keeps in use then, `blocks` addresses by device that are free then, too.
    """
    devices = [device for device in facts.devices if device.segments is not None]
    gone, also = set(storages), blocks or {}
    released = stranded = 0
    for device in devices:
        freed = _freed(facts, device, gone) | also.get(device.device, frozenset())
        released += fragmentation(device.segments or (), freed, in_use).releasable
        stranded += left_in_segments(device.segments or (), freed, in_use)
    return GivenBack(released, stranded) if devices else None


def pools_of(facts: Facts, device: DeviceFacts) -> tuple[Pool, ...]:
    """Return the pools of `device`: small blocks, large blocks, blocks of other streams, of CUDA graphs and MemPools."""
    if device.segments is None:
        return ()
    spaces = by_pool(device.segments, in_use=pools_in_use(facts))
    return tuple(Pool(_name(facts, key), space) for key, space in spaces.items())


def _name(facts: Facts, key: PoolKey) -> str:
    words = ["small blocks" if key.is_small else "large blocks"]
    if key.pool != (0, 0):
        words.insert(0, _keeper(facts.graph, next((pool for pool in facts.pools if pool.pool == key.pool), None), key.pool))
    elif key.stream:
        words.append(f"stream {key.stream:#x}")
    return " · ".join(words)


def _keeper(graph: Graph, fact: PoolFact | None, pool: PoolId) -> str:
    """Return the object that keeps a private pool, by the path to it: `CUDAGraph g`; the user's own names first."""
    if fact is None:
        return f"pool {pool}, no longer in use"
    kind = graph.nodes[fact.keepers[0]].type_name
    for root in sorted(graph.roots, key=lambda root: root.kind in STALE_KINDS):
        way = shortest_path(graph, root, fact.keepers)
        if way:
            return f"{kind} {path_text(graph, root, way, shorten=4)}"
    return kind
