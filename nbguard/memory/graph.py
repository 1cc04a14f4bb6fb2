"""Who holds the bytes: from a graph of references to holders that re-add to the total.

A storage belongs to the set of roots that reach it. Roots of the user's own (names, globals, running code) come first:
only a storage that none of them reaches belongs to a hidden root (`Out[n]`, the last error, unreachable cycles).
So `learn`, displayed once and still named, is `learn`; `Out[7]` is a holder only of what nothing else needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from nbguard.memory.facts import EXPERIMENT_KINDS, Graph, Root
from nbguard.memory.owner_sets import bits_of, owners_of_nodes, owners_of_storages

Edge = tuple[int, int]
"""(parent node, child node): one reference that a cleanup would remove."""

FUNCTION = " → its function"
"""How the step from a finished frame to the function that it ran is written, where a variable has the function too. No
cleanup can remove this reference; what the function keeps can go."""

DEFAULT = " → default "
"""How the step from a function to the defaults of its arguments is written."""

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


def leading_to(graph: Graph, goals: Iterable[int], cut: Set[Edge] = frozenset(), blocked: Collection[int] = ()) -> set[int]:
    """Return the nodes that lead to any of `goals`, these included, without the references in `cut`, not through `blocked`."""
    parents: dict[int, list[int]] = {}
    for parent, node in enumerate(graph.nodes):
        if parent not in blocked:
            for child in node.children:
                if (parent, child) not in cut:
                    parents.setdefault(child, []).append(parent)
    return upwards(parents, (goal for goal in goals if goal not in blocked))


def upwards(parents: Mapping[int, Iterable[int]], starts: Iterable[int]) -> set[int]:
    """Return `starts` and all that stands above them; `parents` says what refers to each."""
    seen = set(starts)
    todo = list(seen)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            if parent not in seen:
                seen.add(parent)
                todo.append(parent)
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
    without = next(_search(graph, root, goals, blocked, keys=False), ())
    return without or next(_search(graph, root, goals, blocked, keys=True), ())


def shortest_paths(
    graph: Graph, root: Root, goals: Collection[int], blocked: Collection[int] = ()
) -> dict[int, tuple[int, ...]]:
    """Return the way from `root` to each of `goals` that it leads to, as `shortest_path` finds them, in one search."""
    found = {path[-1]: path for path in _search(graph, root, goals, blocked, keys=False)}
    if len(found) < len(goals):
        found = {path[-1]: path for path in _search(graph, root, goals, blocked, keys=True)} | found
    return found


def _search(
    graph: Graph, root: Root, goals: Collection[int], blocked: Collection[int], keys: bool
) -> Iterator[tuple[int, ...]]:
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
            yield tuple(reversed(path))
        for child, label in graph.nodes[node].references:
            known = steps.get(child)
            here = steps[node] + bool(label)
            if child in blocked or (known is not None and known <= here) or (label.startswith(KEY) and not keys):
                continue
            steps[child], above[child] = here, node
            (todo.append if label else todo.appendleft)(child)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One row of the table of holders.

    `retained`: bytes that come back if this holder alone is let go. `reaches`: bytes it leads to, shared ones included.
    A shared holder stands for bytes that several roots reach: they come back when all of them are let go.
    `at_least`: it leads to something that was not looked into, so both figures are lower bounds.
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
    at_least: bool = False

    @property
    def is_shared(self) -> bool:
        """Return whether this row stands for bytes that several roots hold together."""
        return self.kind == "shared"


def holders(graph: Graph, device: str | None = None) -> tuple[Holder, ...]:
    """Return every holder of bytes on `device` (None: all), largest first; their `retained` bytes re-add to the total.

    Names of one and the same object form one holder (`learn = best`). All are found in one pass, see `owners`.
    """
    return tuple(row for row, _ in holdings(graph, device))


def holdings(graph: Graph, device: str | None = None) -> tuple[tuple[Holder, frozenset[int]], ...]:
    """Return every holder as `holders` does, each with the storages that its `retained` bytes are."""
    groups = _alias_groups(graph)
    users = (1 << sum(graph.roots[group[0]].kind not in STALE_KINDS for group in groups)) - 1
    entries = [[node for root in group for node in graph.roots[root].nodes] for group in groups]
    owned: dict[int, set[int]] = {}
    owners = owners_of_nodes(graph, entries)
    to_rest = 0 if graph.rest is None else owners[graph.rest]
    for storage, mask in enumerate(owners_of_storages(graph, owners)):
        if mask and device in (None, graph.storages[storage].device):
            owned.setdefault(mask, set()).add(storage)
    reaches = dict.fromkeys((number for mask in owned for number in bits_of(mask)), 0)
    by_owners: dict[int, set[int]] = {}
    for mask, storages in owned.items():
        nbytes = nbytes_of(graph, storages)
        for number in bits_of(mask):
            reaches[number] += nbytes
        by_owners.setdefault(mask & users or mask, set()).update(storages)
    by_who = {tuple(bits_of(mask)): storages for mask, storages in by_owners.items()}
    by_who |= {(n,): set() for n in reaches if users >> n & 1 and (n,) not in by_who}
    rows = [
        (_marked(_holder(graph, groups, who, exclusive, reaches[who[0]]), who, to_rest), frozenset(exclusive))
        for who, exclusive in by_who.items()
        if len(who) == 1 or nbytes_of(graph, exclusive)
    ]
    return tuple(sorted(rows, key=lambda row: (-row[0].retained, -row[0].reaches, row[0].label)))


def _marked(holder: Holder, who: tuple[int, ...], to_rest: int) -> Holder:
    return replace(holder, at_least=True) if any(to_rest >> number & 1 for number in who) else holder


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


def _holder(graph: Graph, groups: list[tuple[int, ...]], who: tuple[int, ...], exclusive: set[int], reaches: int) -> Holder:
    roots = tuple(root for number in who for root in groups[number])
    first = graph.roots[roots[0]]
    stale = first.kind in STALE_KINDS
    retained = nbytes_of(graph, exclusive)
    named_first = sorted(who, key=lambda number: _rank(graph, groups[number]))
    labels = [" = ".join(graph.roots[root].label for root in groups[number]) for number in named_first]
    if len(who) > 1:
        label = " + ".join(labels[:3]) + (f" + {len(labels) - 3} more" if len(labels) > 3 else "")
        return Holder(
            label=label,
            kind="shared",
            retained=retained,
            reaches=retained,
            cell=None,
            what="shared: comes back when all of them are let go",
            stale=stale,
            roots=roots,
        )
    path = ""
    if exclusive and first.kind in ("error", "library"):
        goals = {node for node, fact in enumerate(graph.nodes) if exclusive.intersection(fact.storages)}
        path = path_text(graph, first, shortest_path(graph, first, goals), shorten=5)
    return Holder(
        label=labels[0],
        kind=first.kind,
        retained=retained,
        reaches=reaches,
        cell=first.cell,
        what=first.what,
        stale=stale,
        roots=roots,
        path=path,
    )
