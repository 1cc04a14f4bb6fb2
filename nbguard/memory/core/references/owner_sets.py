"""Owner sets: the groups of starting nodes that lead to each node of a graph, all found in one pass.

A set of owners is an int with a bit for each group. Most nodes have one owner, and one walk finds them: each group in turn
marks the nodes that no earlier one has. Only below a node that a second group runs into can there be several owners. That part
is condensed into its strongly connected components, whose members have the same owners, and the sets flow down from component
to component, each visited once. So the time grows with the graph, not with the number of groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from nbguard.libraries import attributes_of_kind
from nbguard.memory.core.advice import NONE, Advice, empty_parts, in_sequence, is_python, release_names
from nbguard.memory.core.facts import Graph, Root
from nbguard.memory.core.references.graph import (
    GRADIENT,
    SOMEWHERE,
    Edge,
    nbytes_of,
    path_text,
    reach,
    shortest_path,
    storages_of,
)
from nbguard.memory.core.references.releases import metric_reset
from nbguard.units import counted, format_bytes

# --- Tensors that a model's code put on it, which are neither parameter nor buffer nor gradient.


CONTAINERS = frozenset({"list", "dict", "deque", "set", "OrderedDict", "defaultdict"})
"""Containers that a model's code fills, and that `clear()` empties."""
_NAMED = 2
"""Places of the rest that a sentence names."""
_SHARE = 0.05
"""Least share of a model's bytes at which the rest is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestPlace:
    """A place of a model where memory is that is not the model's."""

    path: str  # as one would write it: `model[0].fc.x`
    nbytes: int  # bytes that only this place holds, apart from the model
    has_graph: bool  # it is kept with its autograd graph
    is_container: bool  # a list or the like of several things


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContents:
    """A model's memory by use; the figures add up to the bytes that it leads to."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int  # state of the optimizer, of a Learner
    rest: int
    places: tuple[RestPlace, ...]  # of the rest, the largest first
    advice: Advice  # lets go of tensors with a graph and of a metric's values, and leaves the model; a table may be needed
    hooks: Advice = NONE  # takes the hooks off that keep something
    is_collected: bool = False  # most of the rest are values of metrics, which their own methods clear

    @property
    def words(self) -> str:
        """Return the contents of the model in words, e.g. `6 MiB parameters, 256 MiB in model[0].fc.x`."""
        parts = (
            ("parameters", self.parameters),
            ("buffers", self.buffers),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer),
        )
        own = [f"{format_bytes(nbytes)} {name}" for name, nbytes in parts if nbytes]
        return ", ".join([*own, f"{format_bytes(self.rest)} in {self.whereabouts}"])

    @property
    def whereabouts(self) -> str:
        """Return the places of the rest in words."""
        names = ", ".join(place.path for place in self.places[:_NAMED])
        more = f" and {len(self.places) - _NAMED} more" if len(self.places) > _NAMED else ""
        graphs = " (tensors with a graph)" if any(place.has_graph for place in self.places) else ""
        return f"{names}{more}{graphs}"


def contents_of(graph: Graph, root: Root) -> ModelContents | None:
    """Return the contents of the model or Learner of a name, or None where the rest is small beside the whole."""
    model = _model_of(graph, root)
    if model is None or root.kind not in ("name", "module"):
        return None
    own = _Parts(graph)
    entries = [*own.look_into(model)]
    whole = storages_of(graph, reach(graph, (model,)))
    of_model = own.parameters | own.buffers | own.gradients
    rest = whole - of_model
    if not rest or nbytes_of(graph, rest) <= _SHARE * nbytes_of(graph, whole):
        return None
    places, edges, lines, hooks, metrics = [], set[Edge](), [], dict[str, Edge](), dict[str, Advice]()
    collected = 0
    for edge in entries:
        held = storages_of(graph, reach(graph, (edge[1],), blocked=own.nodes)) & rest
        if not nbytes_of(graph, held):
            continue
        way = shortest_path(graph, root, {edge[1]}, blocked=())
        path = path_text(graph, root, way)
        node = graph.nodes[edge[1]]
        places.append(
            RestPlace(
                path=path,
                nbytes=nbytes_of(graph, held),
                has_graph=_has_graph(graph, edge[1], own.nodes),
                is_container=node.type_name in CONTAINERS,
            )
        )
        if path.endswith("_hooks"):
            hooks |= {f"{path}{label}": (edge[1], child) for child, label in node.references if label}
        reset = metric_reset(graph, root, way)
        if reset is not None:
            metrics[reset.command] = reset
            collected += places[-1].nbytes
        elif places[-1].has_graph and "_hooks" not in path and is_python(f"{path} = None"):
            lines.append((path, node.type_name in CONTAINERS))
            edges |= {(edge[1], child) for child in node.children} if node.type_name in CONTAINERS else {edge}
    places.sort(key=lambda place: -place.nbytes)
    if not places:
        return None
    emptied = [empty_parts(root.module, lines, frozenset(edges))] if 0 < len(lines) <= _LINES else []
    releases = [*metrics.values(), *emptied] if len(metrics) <= _LINES else emptied
    return ModelContents(
        parameters=nbytes_of(graph, own.parameters),
        buffers=nbytes_of(graph, own.buffers - own.parameters),
        gradients=nbytes_of(graph, own.gradients - own.parameters - own.buffers),
        optimizer=nbytes_of(graph, _optimizer_state(graph, root) - of_model - rest),
        rest=nbytes_of(graph, rest),
        places=tuple(places),
        advice=in_sequence(releases),
        hooks=replace(release_names(list(hooks)), cut=frozenset(hooks.values())) if 0 < len(hooks) <= _LINES else NONE,
        is_collected=2 * collected > nbytes_of(graph, rest),
    )


_LINES = 8
"""Places that one line empties."""


def _model_of(graph: Graph, root: Root) -> int | None:
    for node in root.nodes:
        if graph.nodes[node].kind == "model":
            return node
        if graph.nodes[node].kind == "learner":
            return _part(graph, node, "model")
    return None


def _part(graph: Graph, owner: int, kind: str) -> int | None:
    """Return the model or the optimizer that a Learner has, in an attribute of its own or in the dict of its attributes."""
    labels = {f".{attribute}" for attribute in attributes_of_kind(kind)}
    spaces = [owner, *(child for child, step in graph.nodes[owner].references if not step)]
    return next((child for space in spaces for child, step in graph.nodes[space].references if step in labels), None)


def _optimizer_state(graph: Graph, root: Root) -> set[int]:
    """Return the storages that the optimizer of a Learner leads to."""
    learners = [node for node in root.nodes if graph.nodes[node].kind == "learner"]
    optimizers = [opt for node in learners if (opt := _part(graph, node, "optimizer")) is not None]
    return storages_of(graph, reach(graph, optimizers))


class _Parts:
    """The parts of a model: storages by use, and the nodes that are the model's own."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.parameters: set[int] = set()
        self.buffers: set[int] = set()
        self.gradients: set[int] = set()
        self.nodes: set[int] = set()

    def look_into(self, model: int) -> Iterator[Edge]:
        """Yield the references from a model or a module of it to other things than its parts."""
        graph, todo = self._graph, deque([model])
        rest = list[Edge]()
        while todo:
            module = todo.popleft()
            if module in self.nodes:
                continue
            self.nodes.add(module)
            for space, child in self._references(module):
                part = graph.nodes[child].module_part
                if part:
                    below = self._inside(child)
                    if part == "modules":
                        todo.extend(below)
                    else:
                        self._take(part, below)
                else:
                    rest.append((space, child))
        yield from (edge for edge in rest if edge[1] not in self.nodes)

    def _inside(self, parts: int) -> list[int]:
        """Return the contents of a dict of a module's parts, also inside of TorchScript's wrapper."""
        self.nodes.add(parts)
        below: list[int] = []
        for child in self._graph.nodes[parts].children:
            below += self._inside(child) if self._graph.nodes[child].module_part else [child]
        return below

    def _references(self, module: int) -> Iterator[Edge]:
        """Yield the references of a module: those of the dict of its attributes are its own."""
        for child, label in self._graph.nodes[module].references:
            if not label and self._graph.nodes[child].type_name == "dict" and not self._graph.nodes[child].module_part:
                self.nodes.add(child)
                yield from ((child, below) for below in self._graph.nodes[child].children)
            else:
                yield module, child

    def _take(self, part: str, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            node = self._graph.nodes[tensor]
            self.nodes.add(tensor)
            (self.parameters if part == "parameters" else self.buffers).update(node.storages)
            gradients = [child for child, label in node.references if label == GRADIENT]
            self.nodes.update(gradients)
            self.gradients |= storages_of(self._graph, gradients)


def _has_graph(graph: Graph, node: int, blocked: Set[int]) -> bool:
    return any(graph.nodes[n].kind == "graph" for n in reach(graph, (node,), blocked=blocked))


# --- Strongly connected components, sets of nodes that all lead to each other.


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


_PRIME = 1_000_000_007


def hashed(mask: int) -> tuple[int, int]:
    """Return a key for a set of owners. Python's own hash of 1 << n has 61 values, so thousands of them would be a list."""
    return mask % _PRIME, mask


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


# --- Cycles that wait for the collector, in words, with their owners, their number, and the reference that closes each.


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
_ERROR_SHOWN = "FrameInfo"
"""Class of stack_data's: IPython makes one of each frame that it shows of an error, in a cycle with its lines."""
_PARTS = frozenset(
    {"dict", "list", "tuple", "set", "OrderedDict", "cell", "function", "method", "partial", "deque", "mappingproxy"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    owner: int  # node of the object that it is a cycle of
    of: str  # class of the owner; empty for a frame of an error that IPython has shown
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
        groups.setdefault((cycle.of, cycle.how, cycle.beside), []).append(cycle)
    sized = [
        (nbytes_of(graph, storages_of(graph, {n for one in group for n in one.nodes})), key) for key, group in groups.items()
    ]
    shown = [key for _, key in sorted(sized, key=lambda each: -each[0])]
    words = [_words(graph, key, groups[key]) for key in shown[:_SHOWN]]
    more = [counted(len(shown) - _SHOWN, "more kind", "more kinds")] if len(shown) > _SHOWN else []
    return "; ".join((*words, *more))


def _words(graph: Graph, key: tuple[str, str, str], group: Sequence[_Cycle]) -> str:
    type_name, how, beside = key
    if not type_name:
        return f"frames that IPython showed of earlier errors{f', with their {beside}' if beside else ''}"
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
            fact = graph.nodes[owner]
            if fact.type_name in _PARTS or (fact.kind in _OF_RUNS and not fact.is_error):
                continue
            reached = frozenset(reach(graph, whole))
            below |= reached
            beside = (graph.nodes[n].type_name for n in sorted(reached - {owner}) if graph.nodes[n].kind == "optimizer")
            is_shown = fact.type_name == _ERROR_SHOWN and owner not in users
            name, how = ("", "") if is_shown else (fact.type_name, _how(graph, owner, whole))
            yield _Cycle(owner=owner, of=name, how=how, beside=next(beside, ""), nodes=reached)


def _rank(graph: Graph, node: int, users: Collection[int]) -> tuple[int, int]:
    """Order the objects of a cycle by how much they tell: a Learner, one of the user's classes, a model, an error, others."""
    fact = graph.nodes[node]
    if fact.kind == "learner":
        return 0, node
    if node in users and fact.type_name not in _PARTS:
        return 1, node
    if fact.kind == "model":
        return 2, node
    if fact.is_error:
        return 3, node
    if fact.type_name in _PARTS or fact.kind in ("cell", "code", "graph", *_OF_RUNS):
        return 9, node
    return 5 if fact.kind == "tensor" else 4, node


def _how(graph: Graph, owner: int, cycle: Set[int]) -> str:
    """Return in words the shortest way from an object back to itself."""
    if graph.nodes[owner].is_error:
        return " through its own traceback"
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
