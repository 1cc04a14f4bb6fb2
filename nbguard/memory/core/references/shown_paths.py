"""Paths as a report shows them, read back into the ways through the graph and the reference each ends with.

A path is an expression where Python has one, `runs['a'].learn`, and words where it has none: `lib.HOOKS[<K>] → closure m`. Both
can be given to a cleanup, which takes away the last reference on the way that can be taken away at all.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from nbguard.errors import TargetError
from nbguard.memory.core.advice import ONLY_WITH_KERNEL, is_python
from nbguard.memory.core.facts import EXPERIMENT_KINDS, Graph, Node, Root, Target
from nbguard.memory.core.references.graph import (
    BASE,
    CONTEXT,
    DEFAULT,
    FUNCTION,
    GRAPH,
    SOMEWHERE,
    STALE_KINDS,
    Edge,
    path_text,
    reach,
)

Way = tuple[int, ...]
"""The nodes of a way from a root on."""

ANY = "[*]"
WAITING = frozenset({"task", "timer"})
"""Registries of an event loop. A cancelled entry goes only when the cell's own turn ends."""
HOOK = re.compile(r"_hooks\[\d+\]$")
"""End of the path of a module's or tensor's hook: as a target it goes as often as it is registered."""
_MOST = 100
"""Most ways that are written alike and all returned."""
_FIXED = frozenset(
    {
        *("tuple", "frozenset", "mappingproxy", "partial", "method", "builtin_function_or_method", "generator", "coroutine"),
        *("cell", "Token", "Context", "ContextVar", "hamt", "hamt_bitmap_node", "hamt_array_node", "SimpleQueue", "_Info"),
    }
)
"""Classes whose objects keep for good the objects that they were made of, or let nobody in."""
_LOCKED = frozenset({"frame", "traceback", "locals", "graph", "cell", "data"})
_UNWRITTEN = (GRAPH, BASE, DEFAULT, FUNCTION, " → closure ")


def ways_written(graph: Graph, text: str) -> tuple[tuple[Root, Way], ...]:
    """Return the ways that a report would write as `text`, an empty tuple where there are none.

    ` → …` stands for any number of steps, as a long path is shortened so, and `[*]` for any key.
    """
    found = dict[tuple[str, Way], tuple[Root, Way]]()
    for root in graph.roots:
        if root.label == text:
            found |= {(root.label, (node,)): (root, (node,)) for node in root.nodes}
        elif text.startswith(root.label):
            for way in _ways(graph, root, text):
                found.setdefault((root.label, way[-2:]), (root, way))
                if len(found) >= _MOST:
                    break
    return tuple(found.values())


def _ways(graph: Graph, root: Root, text: str) -> Iterator[Way]:
    """Yield the ways below a root, by (node, place in the text, whether any step may be left out) as far as each is read."""
    start = len(root.label)
    above: dict[tuple[int, int, bool], tuple[int, int, bool] | None] = {(node, start, False): None for node in root.nodes}
    todo = deque(above)
    while todo:
        state = todo.popleft()
        node, at, may_skip = state
        for child, label in graph.nodes[node].references:
            for after in _read(text, at, _written(root, at == start, label), may_skip):
                if after[0] == len(text) and label:
                    yield (*_nodes(above, state), child)
                if (reached := (child, *after)) not in above:
                    above[reached] = state
                    todo.append(reached)


def _written(root: Root, is_first: bool, label: str) -> str:
    """Return how a step is written: an attribute of the last error is words, as that has no name in Python."""
    return f" → {label[1:]}" if root.kind == "error" and is_first and label.startswith(".") else label


def _read(text: str, at: int, label: str, may_skip: bool) -> Iterator[tuple[int, bool]]:
    """Yield how far the text is read after a step with this label, and whether steps may be left out from there on."""
    if not label:
        yield at, may_skip
        return
    if text.startswith(label, at):
        yield at + len(label), label == SOMEWHERE
    if label[0] == "[" and text.startswith(ANY, at):
        yield at + len(ANY), False
    if may_skip:
        yield at, True
    elif text.startswith(SOMEWHERE, at):
        yield at + len(SOMEWHERE), True


def _nodes(above: dict[tuple[int, int, bool], tuple[int, int, bool] | None], state: tuple[int, int, bool]) -> Way:
    way = [state[0]]
    up = above[state]
    while up is not None:
        way.append(up[0])
        up = above[up]
    return tuple(reversed(way))


def last_reference(graph: Graph, root: Root, way: Sequence[int]) -> Edge | None:
    """Return the last reference on a way that can be taken away; None where only the root itself can go."""
    for place in range(len(way) - 1, 0, -1):
        if can_let_go(graph, root, way[place - 1], way[place]):
            return way[place - 1], way[place]
    return None


def can_let_go(graph: Graph, root: Root, parent: int, child: int) -> bool:
    """Say whether a reference can be taken out of its owner: not out of a tuple, a closure, a frame or a graph."""
    node = graph.nodes[parent]
    label = dict(node.references).get(child, "")
    if label.startswith(CONTEXT):  # the variable gets another value there
        return root.kind not in ("frame", "error")
    if not label or node.is_fixed or node.type_name in _FIXED or node.kind in _LOCKED or root.kind in ("frame", "error"):
        return False
    if label.startswith(".__") and label.endswith("__"):  # functions that Python calls by itself, as a class's `__init__`
        return False
    return label[0] in ".[" or (node.type_name in ("set", "WeakKeyDictionary") and not label.startswith(_UNWRITTEN))


def is_written(graph: Graph, text: str) -> bool:
    """Say whether a report would write any way as `text`."""
    numbered = re.fullmatch(r"(.+) \(\d+\)", text)
    return bool(ways_written(graph, text) or (numbered and ways_written(graph, numbered[1])))


def targets_written(graph: Graph, text: str) -> tuple[Target, ...]:
    """Return the targets of a cleanup for a path as a report shows it, one for each reference that is written so.

    Raises:
        TargetError: the path is known, and nothing can be done about it: code that runs uses it, or C++ keeps it.
    """
    if (numbered := re.fullmatch(r"(.+) \((\d+)\)", text)) and not ways_written(graph, text):  # one of several written alike
        alike_targets = targets_written(graph, numbered[1]) if ways_written(graph, numbered[1]) else ()
        return tuple(each for each in alike_targets if each.text == text)
    ways = ways_written(graph, text)
    targets = dict.fromkeys(target for root, way in ways for target in _targets_on(graph, root, way, text))
    if ways and not targets:
        root = ways[0][0]
        is_running = root.kind == "frame"
        how = "is in use by code that runs: wait until it ends" if is_running else ONLY_WITH_KERNEL.effect
        if root.registry in WAITING:
            how = f"freed at the end of the cell that runs  {root.ended_by}"
        raise TargetError(f"{text} {how}")
    alike = Counter(target.text for target in targets)
    numbers = Counter[str]()
    found = []
    for target in targets:
        numbers[target.text] += 1
        number = f" ({numbers[target.text]})" if alike[target.text] > 1 else ""
        found.append(replace(target, text=target.text + number))
    return tuple(found)


def _targets_on(graph: Graph, root: Root, way: Way, text: str) -> Iterator[Target]:
    refs = [graph.nodes[node].ref for node in way]
    if root.kind == "frame":
        return
    if root.kind == "out" and len(way) == 1:
        yield Target(text=text, root=root.label, value_kind=root.what)
    elif root.kind in STALE_KINDS:
        yield Target(text=text, value=refs[-1], value_kind=graph.nodes[way[-1]].type_name, lets_go=True)
    elif (edge := last_reference(graph, root, way)) is not None:
        yield _target(graph, edge, path_text(graph, root, way) if ANY in text else text)
    elif root.kind in ("name", "module"):
        yield Target(text=text, root=root.label, value_kind=root.what)
    elif root.registry in WAITING:
        return
    elif root.registry == "atexit":
        yield Target(text=text, root=root.label, line=root.ended_by or _unregistering(refs[0]), value_kind=root.what)
    elif root.ended_by and is_python(root.ended_by):
        yield Target(text=text, root=root.label, line=root.ended_by, value_kind=root.what)
    else:
        yield from (_target(graph, edge, text) for edge in references_of_root(graph, root))


def _unregistering(ref: int) -> str:
    """Return the line that takes a function off `atexit`'s list, which no expression reaches: by its id while it is alive."""
    found = f"[f for f in __import__('gc').get_objects() if id(f) == {ref}]"
    return f"[__import__('atexit').unregister(f) for f in {found}]"


def _target(graph: Graph, edge: Edge, text: str) -> Target:
    parent, child = (graph.nodes[node] for node in edge)
    step = dict(parent.references)[edge[1]]
    return Target(text=text, containers=(parent.ref,), value=child.ref, value_kind=child.type_name, step=step)


def references_of_root(graph: Graph, root: Root) -> Iterator[Edge]:
    """Yield the references whose loss leaves a nameless root without memory, each where least is lost."""
    cut = set[Edge]()
    for _ in range(_MOST):
        reached = reach(graph, root.nodes, cut)
        carriers = {node for node in reached if graph.nodes[node].storages}
        way = way_without(graph, root, carriers, cut)
        edge = reference_to_cut(graph, root, way) if way else None
        if edge is None:
            return
        cut.add(edge)
        yield edge


def reference_to_cut(graph: Graph, root: Root, way: Sequence[int]) -> Edge | None:
    """Return the reference on a way whose removal loses least, or None where none can be taken away.

    That is the one to the last hook, callback or the like on the way: a live model stays, the hook on it goes. Without
    such, it is the one to the first experiment, or else to the thing itself.
    """
    return last_reference(graph, root, way[: place_to_cut(graph, way) + 1])


def place_to_cut(graph: Graph, way: Sequence[int]) -> int:
    """Return the place on a way whose cut loses least, as `reference_to_cut` says."""
    callbacks = [place for place, node in enumerate(way) if is_callback(graph.nodes[node])]
    if callbacks:
        place = callbacks[-1]
        while place - 1 in callbacks:
            place -= 1
        return place
    return next((place for place, node in enumerate(way) if graph.nodes[node].kind in EXPERIMENT_KINDS), len(way) - 1)


def is_callback(node: Node) -> bool:
    """Say whether a node is a hook, a callback or a finalizer: it can go, and its owner stays."""
    return node.type_name in ("function", "method", "partial", "_Info")


def way_without(graph: Graph, root: Root, goals: Collection[int], cut: Collection[Edge]) -> Way:
    """Return the nodes of a shortest way from a root to one of `goals` without the references in `cut`; empty if none."""
    above: dict[int, int | None] = dict.fromkeys(root.nodes)
    todo = deque(above)
    while todo:
        node = todo.popleft()
        if node in goals:
            way = [node]
            while (up := above[way[-1]]) is not None:
                way.append(up)
            return tuple(reversed(way))
        for child in graph.nodes[node].children:
            if child not in above and (node, child) not in cut:
                above[child] = node
                todo.append(child)
    return ()


def paths_beginning(graph: Graph, text: str, most: int = 50) -> tuple[str, ...]:
    """Return paths that begin with a text, by one step more than it has, and the roots that do."""
    found = dict.fromkeys(root.label for root in graph.roots if root.label.startswith(text))
    for root in graph.roots:
        if text.startswith(root.label):
            todo = deque((node, root.label) for node in root.nodes)
            met = set(todo)
            while todo and len(found) < most:
                node, written = todo.popleft()
                for child, label in graph.nodes[node].references:
                    step = (child, written + _written(root, written == root.label, label))
                    if label and step[1].startswith(text):
                        found.setdefault(step[1])
                    elif step not in met and text.startswith(step[1]):
                        met.add(step)
                        todo.append(step)
    return tuple(found)[:most]
