"""The graph of references, with the nodes that others lead to, the shortest way to each, and the words for such a way."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import pairwise

from nbguard.memory.core.facts import EXPERIMENT_KINDS, Graph, Root

Edge = tuple[int, int]
"""(parent node, child node): one reference that a cleanup would remove."""

FUNCTION = " → its function"
"""How the step from a finished frame to the function that it ran is written, where a variable has the function too. No
cleanup can remove this reference; but the things that the function keeps can go."""

DEFAULT = " → default "
"""How the step from a function to the defaults of its arguments is written."""

GRAPH = " → graph"
"""How the step from a tensor to the autograd graph behind it is written."""

BASE = " → base"
"""How the step from a view to the tensor that it shows a part of is written."""

GRADIENT = ".grad"
"""How the step from a tensor to its gradient is written."""

CONTEXT = " → context variable "
"""How the step from a context to the value of one of its variables is written."""

KEY = " → key "
"""How the step from a dict to one of its keys is written."""

SOMEWHERE = " → …"
"""How steps are written whose writing is not known, or would be too long."""

STALE_KINDS = frozenset({"out", "error", "cache", "garbage"})


def reach(graph: Graph, starts: Iterable[int], cut: Set[Edge] = frozenset(), blocked: Collection[int] = ()) -> set[int]:
    """Return the nodes that `starts` lead to, themselves included, without the references in `cut`, not through `blocked`."""
    reached = {start for start in starts if start not in blocked}
    todo = list(reached)
    nodes = graph.nodes
    while todo:
        parent = todo.pop()
        for child in nodes[parent].children:
            if child not in reached and child not in blocked and (parent, child) not in cut:
                reached.add(child)
                todo.append(child)
    return reached


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
    """Return `starts` and all nodes above them; `parents` are the nodes that refer to each."""
    above = set(starts)
    todo = list(above)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            if parent not in above:
                above.add(parent)
                todo.append(parent)
    return above


def without(graph: Graph, gone: Set[int], cut: Set[Edge]) -> Graph:
    """Return the graph without the roots with the numbers `gone` and without the references in `cut`."""
    nodes = list(graph.nodes)
    for parent in {parent for parent, _ in cut}:
        kept = [(child, label) for child, label in nodes[parent].references if (parent, child) not in cut]
        children, labels = tuple(child for child, _ in kept), tuple(label for _, label in kept)
        nodes[parent] = replace(nodes[parent], children=children, labels=labels)
    roots = tuple(root for number, root in enumerate(graph.roots) if number not in gone)
    return replace(graph, roots=roots, nodes=tuple(nodes))


def without_arguments(graph: Graph) -> Graph:
    """Return the graph without variables of functions that add no storage to names and outer functions.

    They are arguments mostly, and the caller's variable, or the global, is the holder then. An experiment stays that no other
    variable is, as the autograd graphs of a loss lead to a model's parameters, too.
    """
    met, repeated = set[int](), set[int]()
    for number in sorted(range(len(graph.roots)), key=lambda number: graph.roots[number].kind == "frame"):
        root = graph.roots[number]
        if root.kind in STALE_KINDS:
            continue
        new = reach(graph, root.nodes, blocked=met)
        met |= new
        is_experiment = any(graph.nodes[node].kind in EXPERIMENT_KINDS for node in new.intersection(root.nodes))
        if root.kind == "frame" and not is_experiment and not any(graph.nodes[node].storages for node in new):
            repeated.add(number)
    return without(graph, repeated, set())


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
    paths = {path[-1]: path for path in _search(graph, root, goals, blocked, keys=False)}
    if len(paths) < len(goals):
        paths = {path[-1]: path for path in _search(graph, root, goals, blocked, keys=True)} | paths
    return paths


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


def steps_of(graph: Graph, root: Root, path: Iterable[int]) -> list[str]:
    """Return the written steps of a path, the root's label first; steps that cannot be written, one after another, are one.

    An attribute of the last error is a step in words, as that has no name in Python: `last error → obj`.
    """
    steps = [root.label]
    for parent, child in pairwise(path):
        label = dict(graph.nodes[parent].references).get(child, "")
        if len(steps) == 1 and root.kind == "error" and label.startswith("."):
            label = f" → {label[1:]}"
        if label and not label == steps[-1] == SOMEWHERE:
            steps.append(label)
    return steps


def path_text(graph: Graph, root: Root, path: Iterable[int], shorten: int = 0) -> str:
    """Return a path as the user would write it: `learn.model[0].weight`, `last error → fit → xb`.

    With `shorten`, at most that many steps are kept; the middle becomes `…`.
    """
    steps = steps_of(graph, root, path)
    if shorten and len(steps) > shorten:
        steps = [*steps[: shorten - 2], SOMEWHERE, steps[-1]]
    return "".join(steps)
