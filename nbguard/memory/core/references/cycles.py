"""Cycles that wait for the collector, in words, with their owners, their number, and the reference that closes each."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from nbguard.memory.core.facts import Graph, Root
from nbguard.memory.core.references.components import components
from nbguard.memory.core.references.graph import SOMEWHERE, nbytes_of, reach, storages_of
from nbguard.units import counted

_HOOKS = {
    "._forward_hooks": "forward hook",
    "._forward_pre_hooks": "forward pre-hook",
    "._backward_hooks": "backward hook",
    "._backward_pre_hooks": "backward pre-hook",
    "._state_dict_hooks": "state dict hook",
}
_OF_RUNS = frozenset({"frame", "traceback", "locals"})
_SHOWN = 2
"""Kinds of cycles that are told apart in one line."""
_STEPS = 4
"""Steps of a cycle that are written."""
_PARTS = frozenset(
    {"dict", "list", "tuple", "set", "OrderedDict", "cell", "function", "method", "partial", "deque", "mappingproxy"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    owner: int  # node of the object that it is a cycle of
    how: str  # the reference from it back to its owner, in words
    beside: str  # the optimizer that goes with it
    nodes: frozenset[int]  # that it leads to


def with_cycles_named(graph: Graph, users: Collection[int] = ()) -> Graph:
    """Return a graph whose roots of waiting cycles name their owners; `users` are instances of the user's classes."""
    if not any(root.kind == "garbage" for root in graph.roots):
        return graph
    named = (replace(root, what=words) if (words := cycles_in_words(graph, root, users)) else root for root in graph.roots)
    return replace(graph, roots=tuple(named))


def cycles_in_words(graph: Graph, root: Root, users: Collection[int] = ()) -> str:
    """Return whose cycles a root stands for: `4 earlier Probe (net, In[3]), each in a cycle through its own forward hook`.

    An empty string where it stands for none: for anything else that is not the root of waiting cycles.
    """
    if root.kind != "garbage":
        return ""
    groups: dict[tuple[str, str, str], list[_Cycle]] = {}
    for cycle in _outermost(graph, root, users):
        if not nbytes_of(graph, storages_of(graph, cycle.nodes)):
            continue  # as of models on the meta device
        groups.setdefault((graph.nodes[cycle.owner].type_name, cycle.how, cycle.beside), []).append(cycle)
    sized = [
        (nbytes_of(graph, storages_of(graph, {n for one in group for n in one.nodes})), key) for key, group in groups.items()
    ]
    shown = [key for _, key in sorted(sized, key=lambda each: -each[0])]
    words = [_words(graph, key, groups[key]) for key in shown[:_SHOWN]]
    more = [f"{len(shown) - _SHOWN} more kinds"] if len(shown) > _SHOWN else []
    return "; ".join((*words, *more))


def _words(graph: Graph, key: tuple[str, str, str], group: Sequence[_Cycle]) -> str:
    type_name, how, beside = key
    is_learner = graph.nodes[group[0].owner].kind == "learner"
    several = counted(len(group), f"earlier {type_name}") if is_learner else f"{len(group)} earlier {type_name}"
    what = several if len(group) > 1 else f"an earlier {type_name}"
    named = next((root for root in graph.roots if root.kind == "name" and _is_of(graph, root, type_name)), None)
    where = "" if named is None else f" ({named.label}" + (f", In[{named.cell}])" if named.cell is not None else ")")
    return f"{what}{where}{f' with its {beside}' if beside else ''}, {'each ' if len(group) > 1 else ''}in a cycle{how}"


def _is_of(graph: Graph, root: Root, type_name: str) -> bool:
    return any(graph.nodes[node].type_name == type_name for node in root.nodes)


def _outermost(graph: Graph, root: Root, users: Collection[int]) -> Iterator[_Cycle]:
    """Yield each cycle that no other one leads to."""
    children = [node.children for node in graph.nodes]
    below = set[int]()
    for component in reversed(components(children, root.nodes)):
        whole = frozenset(component)
        is_cycle = len(whole) > 1 or component[0] in children[component[0]]
        if is_cycle and whole.isdisjoint(below):
            owner = min(whole, key=lambda node: _rank(graph, node, users))
            if graph.nodes[owner].type_name in _PARTS or graph.nodes[owner].kind in _OF_RUNS:
                continue
            reached = frozenset(reach(graph, whole))
            below |= reached
            beside = (graph.nodes[n].type_name for n in sorted(reached - {owner}) if graph.nodes[n].kind == "optimizer")
            yield _Cycle(owner=owner, how=_how(graph, owner, whole), beside=next(beside, ""), nodes=reached)


def _rank(graph: Graph, node: int, users: Collection[int]) -> tuple[int, int]:
    """Order the objects of a cycle by how much they tell: a Learner, one of the user's own classes, a model, anything else."""
    fact = graph.nodes[node]
    if fact.kind == "learner":
        return 0, node
    if node in users and fact.type_name not in _PARTS:
        return 1, node
    if fact.kind == "model":
        return 2, node
    return (
        9 if fact.type_name in _PARTS or fact.kind in ("cell", "code", "graph") else 4 if fact.kind == "tensor" else 3
    ), node


def _how(graph: Graph, owner: int, cycle: Set[int]) -> str:
    """Return in words the shortest way from an object back to itself."""
    labels = [label for label in _labels(graph, _way_back(graph, owner, cycle)) if label]
    hook = next((_HOOKS[label] for label in labels if label in _HOOKS), "")
    if hook:
        return f" through its own {hook}"
    name = graph.nodes[owner].type_name
    if len(labels) > _STEPS:
        labels = [*labels[: _STEPS - 2], SOMEWHERE, labels[-1]]
    return f": {name}{''.join(labels)} → {name}" if labels else ""


def _labels(graph: Graph, way: Sequence[int]) -> Iterable[str]:
    for parent, child in pairwise(way):
        yield dict(graph.nodes[parent].references).get(child, "")


def _way_back(graph: Graph, owner: int, cycle: Set[int]) -> tuple[int, ...]:
    """Return the nodes of a shortest way from an object of a cycle to itself, both ends included."""
    above: dict[int, int] = {}
    todo = deque([owner])
    while todo:
        node = todo.popleft()
        for child in graph.nodes[node].children:
            if child == owner:
                way = [owner, node]
                while way[-1] != owner:
                    way.append(above[way[-1]])
                return tuple(reversed(way))
            if child in cycle and child not in above:
                above[child] = node
                todo.append(child)
    return ()
