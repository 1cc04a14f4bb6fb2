"""Strongly connected components, sets of nodes that all lead to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

Children = Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
"""The nodes that each refers to, by its number."""


def components(children: Children, starts: Iterable[int], closed: Set[int] = frozenset()) -> list[list[int]]:
    """Return the strongly connected components below `starts`, each after all that it leads to (Tarjan, without recursion).

    Nodes that are `closed` are not entered.
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    open_nodes: list[int] = []
    done: set[int] = set()
    found: list[list[int]] = []
    for start in starts:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        open_nodes.append(start)
        path = [(start, iter(children[start]))]
        while path:
            node, below = path[-1]
            for child in below:
                if child not in index:
                    if child not in closed:
                        index[child] = low[child] = len(index)
                        open_nodes.append(child)
                        path.append((child, iter(children[child])))
                        break
                elif child not in done and index[child] < low[node]:
                    low[node] = index[child]
            else:
                path.pop()
                if path and low[node] < low[path[-1][0]]:
                    low[path[-1][0]] = low[node]
                if low[node] == index[node]:
                    component = _pop_until(open_nodes, node)
                    done.update(component)
                    found.append(component)
    return found


def _pop_until(nodes: list[int], last: int) -> list[int]:
    """Take nodes off the end, up to and with `last`."""
    at = len(nodes) - 1
    while nodes[at] != last:
        at -= 1
    taken = nodes[at:]
    del nodes[at:]
    return taken
