"""Caches of functions (`functools.lru_cache`): the references that emptying them removes, and whether that frees anything."""

from __future__ import annotations

from collections.abc import Set

from nbguard.memory.core.facts import Graph
from nbguard.memory.core.references.graph import Edge, reach, storages_of

_TYPE = "_lru_cache_wrapper"
_WRAPPED = ".__wrapped__"
"""How the function behind a cache is written: it stays, with all that it leads to."""


def is_function_cache(graph: Graph, node: int) -> bool:
    """Return whether a node is a function with a cache."""
    return graph.nodes[node].type_name == _TYPE


def cached_edges(graph: Graph, node: int) -> frozenset[Edge]:
    """Return the references from a function's cache to the arguments and results that it keeps, not to the function itself."""
    wrapped = {child for child, label in graph.nodes[node].references if label == _WRAPPED}
    spaces = {child for child in graph.nodes[node].children if _leads_to_function(graph, child)}
    return frozenset((node, child) for child in graph.nodes[node].children if child not in wrapped | spaces)


def _leads_to_function(graph: Graph, node: int) -> bool:
    return any(label == _WRAPPED for label in graph.nodes[node].labels)


def caches_worth_emptying(
    graph: Graph, gone: Set[int], cut: Set[Edge], of_interest: Set[int] | None
) -> dict[int, frozenset[Edge]]:
    """Return the caches of functions that alone keep memory alive, once these roots and references are gone, by node.

    Each comes with the references that emptying it removes. A cache that only keeps things needed elsewhere is left out: the
    function would have to compute again, for nothing. With `of_interest`, only caches that lead to one of these nodes count.
    """
    every = {n: cached_edges(graph, n) for n in range(len(graph.nodes)) if is_function_cache(graph, n)}
    if not any(every.values()):
        return {}
    entries = [node for number, root in enumerate(graph.roots) if number not in gone for node in root.nodes]
    staying = storages_of(graph, reach(graph, entries, cut | frozenset().union(*every.values())))
    alive = reach(graph, entries, cut)
    worth = {}
    for node, edges in every.items():
        below = reach(graph, (child for _, child in edges), cut) if node in alive else set()
        if of_interest is not None and not below & of_interest:
            continue
        if storages_of(graph, below) - staying:
            worth[node] = edges
    return worth
