"""Private pools of the allocator, and the objects that keep one in use."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Set
from typing import Any

from nbguard.memory.core.facts import Graph, PoolFact, PoolId
from nbguard.memory.core.references.graph import reach_of_roots
from nbguard.memory.scan.heap.kinds import mro_of

_left: frozenset[PoolId] = frozenset()
"""Private pools that the latest `empty_cache` gave nothing back of, though nothing named kept them."""


def remember_left_pools(pools: Set[PoolId]) -> None:
    """Remember the private pools that an `empty_cache` has just left with free segments while nothing named kept them."""
    global _left
    _left = frozenset(pools)


def pool_facts(keepers: Iterable[tuple[int, Any]], graph: Graph) -> tuple[PoolFact, ...]:
    """Return the private pools that (node, CUDAGraph or MemPool) pairs keep in use, and those that an empty cache left."""
    global _left
    by_pool: dict[PoolId, list[tuple[int, Any]]] = {}
    has_failed = False
    for node, keeper in keepers:
        pool = _pool_of(keeper)
        if pool is not None:
            by_pool.setdefault(pool, []).append((node, keeper))
        else:  # its capture may have failed: then the pool that it was to share with others stays in use
            has_failed = True
    if not by_pool and not _left:
        return ()
    named = reach_of_roots(graph, (number for number, root in enumerate(graph.roots) if root.kind != "library"))
    facts = []
    for pool, pairs in by_pool.items():
        nodes = tuple(node for node, _ in pairs)
        unnamed = tuple(node for node in nodes if node not in named)
        if unnamed != nodes:
            _left -= {pool}
        is_shared = _is_shared([keeper for _, keeper in pairs], has_failed)
        facts.append(PoolFact(pool=pool, keepers=nodes, unnamed=unnamed, is_shared=is_shared, is_left=pool in _left))
    return (*facts, *(PoolFact(pool=pool, keepers=(), is_left=True) for pool in sorted(_left - by_pool.keys())))


def _is_shared(keepers: list[Any], has_failed: bool) -> bool:
    """Say whether more than the keepers of a pool may use it: only a MemPool has a count of its users."""
    binding: Any = sys.modules["torch"]._C
    pools = [keeper for keeper in keepers if binding._CUDAGraph not in mro_of(type(keeper))]
    if pools and hasattr(binding._MemPool, "use_count"):
        return bool(binding._MemPool.use_count(pools[0]) > len(keepers))
    return has_failed


def _pool_of(keeper: Any) -> PoolId | None:
    """Return the pool's id as torch itself tells it: by torch's own method, not by one that a subclass has put over it."""
    binding: Any = sys.modules["torch"]._C
    try:
        if binding._CUDAGraph in mro_of(type(keeper)):
            return tuple(binding._CUDAGraph.pool(keeper))
        return tuple(binding._MemPool.id.__get__(keeper))
    except (RuntimeError, AttributeError):  # a graph that has captured nothing; a torch without MemPools
        return None
