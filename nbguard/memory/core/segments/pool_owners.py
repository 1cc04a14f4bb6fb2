"""The CUDA graphs or MemPools that own the allocator's private pools, and the line that ends each one's ownership."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nbguard.memory.core.advice import NONE, Advice, release_names, release_stale
from nbguard.memory.core.facts import Facts, Graph, PoolFact, PoolId
from nbguard.memory.core.references.graph import STALE_KINDS, path_text, reach_of_roots, shortest_path
from nbguard.memory.core.references.releases import release_of_way

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
