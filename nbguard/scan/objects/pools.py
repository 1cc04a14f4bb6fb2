"""Private pools of the allocator: which objects keep one in use."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from nbguard.memory.facts import PoolFact, PoolId
from nbguard.scan.heap.kinds import mro_of


def pool_facts(keepers: Iterable[tuple[int, Any]]) -> tuple[PoolFact, ...]:
    """Return the private pools that (node, CUDAGraph or MemPool) pairs keep in use."""
    by_pool: dict[PoolId, list[int]] = {}
    for node, keeper in keepers:
        pool = _pool_of(keeper)
        if pool is not None:
            by_pool.setdefault(pool, []).append(node)
    return tuple(PoolFact(pool, tuple(nodes)) for pool, nodes in by_pool.items())


def _pool_of(keeper: Any) -> PoolId | None:
    """Return the pool's id as torch itself tells it: by torch's own method, not by one that a subclass has put over it."""
    binding: Any = sys.modules["torch"]._C
    try:
        if binding._CUDAGraph in mro_of(type(keeper)):
            return tuple(binding._CUDAGraph.pool(keeper))
        return tuple(binding._MemPool.id.__get__(keeper))
    except (RuntimeError, AttributeError):  # a graph that has captured nothing; a torch without MemPools
        return None
