"""Who holds the bytes: from a graph of references to holders that re-add to the total.

A storage belongs to the set of roots that reach it. Roots of the user's own (names, globals, running code) come first:
only a storage that none of them reaches belongs to a hidden root (`Out[n]`, the last error, unreachable cycles).
So `learn`, displayed once and still named, is `learn`; `Out[7]` is a holder only of what nothing else needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from itertools import pairwise

from nbguard.core.facts import EXPERIMENT_KINDS, Graph, Root

Edge = tuple[int, int]
"""(parent node, child node): one reference that a cleanup would remove."""

FUNCTION = " → its function"
"""How the step from a finished frame to the function that it ran is written, where a variable has the function too. No
cleanup can remove this reference."""

KEY = " → key "
"""How the step from a dict to one of its keys is written."""

STALE_KINDS = frozenset({"out", "error", "cache", "garbage"})


def reach(graph: Graph, starts: Iterable[int], cut: Set[Edge] = frozenset(), blocked: Collection[int] = ()) -> set[int]:
    """Return the nodes that `starts` lead to, themselves included, without the references in `cut`, not through `blocked`."""
    seen = {start for start in starts if start not in blocked}
    todo = list(seen)
    nodes = graph.nodes
    while todo:
        parent = todo.pop()
        for child in nodes[parent].children:
            if child not in seen and child not in blocked and (parent, child) not in cut:
                seen.add(child)
                todo.append(child)
    return seen


def storages_of(graph: Graph, nodes: Iterable[int]) -> set[int]:
    """Return the storages that these nodes hold directly."""
    return {storage for node in nodes for storage in graph.nodes[node].storages}


def reach_of_roots(graph: Graph, roots: Iterable[int], cut: Set[Edge] = frozenset()) -> set[int]:
    """Return the nodes that the roots with these numbers lead to."""
    return reach(graph, (node for root in roots for node in graph.roots[root].nodes), cut)


def nbytes_of(graph: Graph, storages: Iterable[int]) -> int:
    """Return the bytes of these storages together."""
    return sum(graph.storages[storage].nbytes for storage in storages)


def shortest_path(graph: Graph, root: Root, goals: Collection[int], blocked: Collection[int] = ()) -> tuple[int, ...]:
    """Return the nodes from `root` to the nearest of `goals`, both ends included; empty if there is no way.

    A way through the keys of a dict is taken only if there is no other: `learn.model` says more than a key of `learn.opt`.
    """
    return _search(graph, root, goals, blocked, keys=False) or _search(graph, root, goals, blocked, keys=True)


def _search(graph: Graph, root: Root, goals: Collection[int], blocked: Collection[int], keys: bool) -> tuple[int, ...]:
    """Search breadth first by written steps: a step without a label (an object's attribute dict) counts nothing."""
    above: dict[int, int | None] = {node: None for node in root.nodes if node not in blocked}
    steps = dict.fromkeys(above, 0)
    todo = deque(above)
    done: set[int] = set()
    while todo:
        node = todo.popleft()
        if node in done:
            continue
        done.add(node)
        if node in goals:
            path = [node]
            while (up := above[path[-1]]) is not None:
                path.append(up)
            return tuple(reversed(path))
        for child, label in graph.nodes[node].references:
            known = steps.get(child)
            here = steps[node] + bool(label)
            if child in blocked or (known is not None and known <= here) or (label.startswith(KEY) and not keys):
                continue
            steps[child], above[child] = here, node
            (todo.append if label else todo.appendleft)(child)
    return ()


def path_text(graph: Graph, root: Root, path: Iterable[int], shorten: int = 0) -> str:
    """Return a path as the user would write it: `learn.model[0].weight`, `last error → fit → xb`.

    With `shorten`, at most that many steps are kept; the middle becomes `…`.
    """
    steps = [root.label]
    nodes = list(path)
    for parent, child in pairwise(nodes):
        label = dict(graph.nodes[parent].references).get(child, "")
        if label:
            steps.append(label)
    if shorten and len(steps) > shorten:
        steps = [*steps[: shorten - 2], " → …", steps[-1]]
    return "".join(steps)


@dataclass(frozen=True, slots=True)
class Holder:
    """One row of the table of holders.

    `retained`: bytes that come back if this holder alone is let go. `reaches`: bytes it leads to, shared ones included.
    A shared holder stands for bytes that several roots reach: they come back when all of them are let go.
    """

    label: str
    kind: str
    retained: int
    reaches: int
    cell: int | None
    what: str
    stale: bool
    roots: tuple[int, ...]
    path: str = ""

    @property
    def is_shared(self) -> bool:
        """Return whether this row stands for bytes that several roots hold together."""
        return self.kind == "shared"


def holders(graph: Graph, device: str | None = None) -> tuple[Holder, ...]:
    """Return every holder of bytes on `device` (None: all), largest first; their `retained` bytes re-add to the total.

    Names of one and the same object form one holder (`learn = best`).
    """
    wanted = {i for i, storage in enumerate(graph.storages) if device in (None, storage.device)}
    groups = _alias_groups(graph)
    reached = [storages_of(graph, reach_of_roots(graph, group)) & wanted for group in groups]
    owners: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        stale = graph.roots[group[0]].kind in STALE_KINDS
        for storage in reached[number]:
            have = owners.setdefault(storage, [])
            if not stale or all(graph.roots[groups[other][0]].kind in STALE_KINDS for other in have):
                have.append(number)
    by_owners: dict[tuple[int, ...], set[int]] = {}
    for storage, who in owners.items():
        by_owners.setdefault(tuple(who), set()).add(storage)
    rows = [
        _holder(graph, groups, who, exclusive, reached)
        for who, exclusive in by_owners.items()
        if nbytes_of(graph, exclusive) or len(who) == 1
    ]
    alone = {who[0] for who in by_owners if len(who) == 1}
    rows += [
        _holder(graph, groups, (number,), set(), reached)
        for number, storages in enumerate(reached)
        if storages and number not in alone and graph.roots[groups[number][0]].kind not in STALE_KINDS
    ]
    return tuple(sorted(rows, key=lambda row: (-row.retained, -row.reaches, row.label)))


def _alias_groups(graph: Graph) -> list[tuple[int, ...]]:
    """Return the roots in groups: names of the same object together, the user's own roots before the stale ones."""
    groups: dict[object, list[int]] = {}
    for number, root in enumerate(graph.roots):
        key: object = (root.kind, root.nodes) if root.kind == "name" and root.nodes else number
        groups.setdefault(key, []).append(number)
    return sorted((tuple(group) for group in groups.values()), key=lambda group: graph.roots[group[0]].kind in STALE_KINDS)


def _rank(graph: Graph, group: tuple[int, ...]) -> int:
    """Return 0 for a Learner, 1 for another experiment, 2 for the rest: the order in which shared holders are named."""
    kinds = {graph.nodes[node].kind for node in graph.roots[group[0]].nodes}
    return 0 if "learner" in kinds else 1 if kinds & EXPERIMENT_KINDS else 2


def _holder(
    graph: Graph, groups: list[tuple[int, ...]], who: tuple[int, ...], exclusive: set[int], reached: list[set[int]]
) -> Holder:
    roots = tuple(root for number in who for root in groups[number])
    first = graph.roots[roots[0]]
    stale = first.kind in STALE_KINDS
    retained = nbytes_of(graph, exclusive)
    named_first = sorted(who, key=lambda number: _rank(graph, groups[number]))
    labels = [" = ".join(graph.roots[root].label for root in groups[number]) for number in named_first]
    if len(who) > 1:
        label = " + ".join(labels[:3]) + (f" + {len(labels) - 3} more" if len(labels) > 3 else "")
        return Holder(label, "shared", retained, retained, None, "shared: comes back when all of them are let go", stale, roots)
    path = ""
    if exclusive and first.kind in ("error", "library"):
        goals = {node for node, fact in enumerate(graph.nodes) if exclusive.intersection(fact.storages)}
        path = path_text(graph, first, shortest_path(graph, first, goals), shorten=5)
    return Holder(
        labels[0], first.kind, retained, nbytes_of(graph, reached[who[0]]), first.cell, first.what, stale, roots, path
    )
