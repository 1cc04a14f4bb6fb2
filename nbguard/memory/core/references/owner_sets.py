"""Owner sets: the groups of starting nodes that lead to each node of a graph, all found in one pass.

A set of owners is an int with a bit for each group. Most nodes have one owner, and one walk finds them: each group in turn
marks the nodes that no earlier one has. Only below a node that a second group runs into can there be several owners. That part
is condensed into its strongly connected components, whose members have the same owners, and the sets flow down from component
to component, each visited once. So the time grows with the graph, not with the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from nbguard.memory.core.facts import Graph
from nbguard.memory.core.references.components import Children, components

_BLOCKED = -1
_NO_CUT: frozenset[tuple[int, int]] = frozenset()


def owners_of_nodes(
    graph: Graph, groups: Iterable[Iterable[int]], cut: Set[tuple[int, int]] = _NO_CUT, blocked: Iterable[int] = ()
) -> list[int]:
    """Return, by node, the groups that lead to it: bit n stands for the n-th of `groups`, each some nodes to start from.

    Without the references in `cut`, (parent, child) pairs, and not through the nodes `blocked`.
    """
    children = _without(graph, cut)
    owners = [0] * len(children)
    for node in blocked:
        owners[node] = _BLOCKED
    met = _mark(children, groups, owners)
    if met:
        _spread(children, met, owners)
    return [0 if mask == _BLOCKED else mask for mask in owners] if blocked else owners


def owners_of_storages(graph: Graph, owners: Iterable[int]) -> list[int]:
    """Return, by storage, the owners of the nodes that hold it; `owners` as `owners_of_nodes` returns them."""
    by_storage = [0] * len(graph.storages)
    for node, mask in zip(graph.nodes, owners, strict=True):
        if mask:
            for storage in node.storages:
                by_storage[storage] |= mask
    return by_storage


def bits_of(mask: int) -> Iterator[int]:
    """Yield the numbers of the groups in a set of owners, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _without(graph: Graph, cut: Set[tuple[int, int]]) -> list[Sequence[int]]:
    children: list[Sequence[int]] = [node.children for node in graph.nodes]
    for parent in {parent for parent, _ in cut}:
        children[parent] = [child for child in children[parent] if (parent, child) not in cut]
    return children


def _mark(children: Children, groups: Iterable[Iterable[int]], owners: list[int]) -> dict[int, int]:
    """Give each node that is reached its first owner; return the others' owners of nodes that they ran into."""
    met: dict[int, int] = {}
    for number, entries in enumerate(groups):
        own = 1 << number
        todo: list[int] = []
        below: Iterable[int] = entries
        while True:
            for node in below:
                known = owners[node]
                if not known:
                    owners[node] = own
                    todo.append(node)
                elif known != own and known != _BLOCKED:
                    met[node] = met.get(node, 0) | own
            if not todo:
                break
            below = children[todo.pop()]
    return met


def _spread(children: Children, met: Mapping[int, int], owners: list[int]) -> None:
    """Complete the owners of all nodes below those that more than one group ran into."""
    for node, more in met.items():
        owners[node] |= more
    closed = {node for node, mask in enumerate(owners) if mask == _BLOCKED}
    for component in reversed(components(children, met, closed)):
        mask = 0
        for node in component:
            mask |= owners[node]
        for node in component:
            owners[node] = mask
            for child in children[node]:
                if owners[child] != _BLOCKED:
                    owners[child] |= mask
