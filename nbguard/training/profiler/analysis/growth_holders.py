"""Holders of memory in two scans from within a fit, and the one that has grown. Pure functions of graphs of references."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from nbguard.memory.core.facts import Graph, Root, RootKind
from nbguard.memory.core.references.graph import GRAPH, STALE_KINDS, shortest_paths
from nbguard.units import KiB

HolderPath = tuple[str, ...]
"""The way from a root to a tensor as one would write it, step by step: ("losses", "[3]", " → graph")."""

_ORDER = ("name", "module", "frame")
BASE = " → base"
"""The step from a view to the tensor that it is of."""
_CARRIED = 16
"""Most tensors, whose graphs others go on from, with their whole graphs counted."""
_ITEM = r"\[\d+\]"
"""A step to an item of a list."""
_UNWRITTEN = ("deque", "set", "frozenset")
_FASTCORES, _ITEMS = "L", ".items"
"""fastcore's list, and its attribute with the list inside: one writes `stats[0]`, not `stats.items[0]`."""
_LIST = "list"
NESTED = "nested"
"""Stands for the class of a container whose items have the tensors."""
JOINED = "joined"
"""Stands for the class of a tensor that others are joined to."""


@dataclass(frozen=True, slots=True)
class HolderSizes:
    """The sizes that one scan found at each place, in bytes of tensors, and nodes of autograd graphs."""

    nbytes: Mapping[HolderPath, int]  # by place
    nodes: Mapping[HolderPath, int]  # by place, which ends with `GRAPH`
    kinds: Mapping[str, RootKind] = field(default_factory=dict)  # of the roots, by the first step of a place
    types: Mapping[HolderPath, str] = field(default_factory=dict)  # class names of the objects at each place, and above

    def root(self, at: HolderPath) -> RootKind:
        """Return the kind of the root where the way to a place begins."""
        return self.kinds.get(at[0], "name")


def holder_sizes(graph: Graph, names: Mapping[int, str], older: Collection[int] = ()) -> HolderSizes:
    """Return the sizes by place. Each storage counts where the user would look first: names, globals, outer functions.

    A tensor that has a name of its own counts there, and not on the way into another one's graph.

    Args:
        graph: of one scan.
        older: the `ref` of each tensor whose graph is older than the fit: these graphs have no size.
        names: variables of running functions, by the `ref` of the node.
    """
    holding = {node: fact.storages for node, fact in enumerate(graph.nodes) if fact.storages}
    left = {storage for storages in holding.values() for storage in storages}
    write = _Writer(graph, names)
    nbytes: dict[HolderPath, int] = {}
    nodes: dict[HolderPath, int] = {}
    graph_sizes = _sizes_of_graphs(graph, holding)
    roots = _in_order(graph.roots)
    for root, is_direct in [*((root, True) for root in roots if root.kind == "name"), *((root, False) for root in roots)]:
        goals = {node for node, storages in holding.items() if not left.isdisjoint(storages)}
        if not goals:
            break
        ways = {node: (node,) for node in root.nodes if node in goals} if is_direct else shortest_paths(graph, root, goals)
        for node, path in sorted(ways.items(), key=lambda way: len(way[1])):
            mine, size = left.intersection(holding[node]), graph_sizes.pop(node, 0)
            size = 0 if graph.nodes[node].ref in older else size
            if not mine and not size:
                continue
            place = write.place(root, path)
            nbytes[place] = nbytes.get(place, 0) + sum(graph.storages[storage].nbytes for storage in mine)
            left -= mine
            if size:
                graph_place = (*place, GRAPH)
                nodes[graph_place] = nodes.get(graph_place, 0) + size
    return HolderSizes(nbytes, nodes, {root.label: root.kind for root in roots}, write.types)


def _sizes_of_graphs(graph: Graph, tensors: Iterable[int]) -> dict[int, int]:
    """Return how many nodes the graph behind each tensor has, each node counted once.

    A graph that others go on from counts first: a state that is carried from batch to batch has all the nodes, and the loss
    that was computed from it only its own; a running sum has all but those of the last loss.
    """
    heads = {node: [child for child, label in graph.nodes[node].references if label == GRAPH] for node in tensors}
    inner = {child for node in graph.nodes if node.kind == "graph" for child in node.children}
    holders = [node for node in graph.nodes if node.kind not in ("graph", "tensor")]
    held = {child for node in holders for child in node.children}
    in_tuples = {child for node in holders for child, label in node.references if re.fullmatch(_ITEM, label)}
    bases = {child for node in heads for child, label in graph.nodes[node].references if label == BASE} - held
    goes_on = (node for node in heads if node not in bases and not inner.isdisjoint(heads[node]))
    carried = sorted(goes_on, key=lambda node: node not in held)
    few = [node for node in carried if node in held][:_CARRIED]
    few.sort(key=lambda node: _size_of_graph(graph, node, set()))  # an output has all the nodes of the state, and its own
    counted: set[int] = set()
    states = [node for node in heads if node in in_tuples]  # (h, c) of an LSTM, whose output has most of their nodes, too
    order = dict.fromkeys((*few, *states, *carried, *heads))
    return {node: _size_of_graph(graph, node, counted) for node in order}


def _size_of_graph(graph: Graph, tensor: int, counted: set[int]) -> int:
    """Return how many nodes the graph behind a tensor has that were not `counted` yet."""
    before = len(counted)
    todo = [child for child, label in graph.nodes[tensor].references if label == GRAPH]
    while todo:
        node = todo.pop()
        if graph.nodes[node].kind == "graph" and node not in counted:
            counted.add(node)
            todo += graph.nodes[node].children
    return len(counted) - before


def _in_order(roots: Iterable[Root]) -> list[Root]:
    """Return the roots in the order of their preference for naming things; of running functions the outermost first."""
    outermost = [*roots][::-1]
    rank = {kind: number for number, kind in enumerate(_ORDER)}
    return sorted(outermost, key=lambda root: (root.kind in STALE_KINDS, rank.get(root.kind, len(rank))))


class _Writer:
    """Writes paths as places."""

    def __init__(self, graph: Graph, names: Mapping[int, str]) -> None:
        self._graph = graph
        self._names = names
        self._labels: dict[int, dict[int, str]] = {}
        self.types: dict[HolderPath, str] = {}  # by place, of all that were written

    def place(self, root: Root, path: tuple[int, ...]) -> HolderPath:
        """Return the steps from `root` along the nodes of `path`; steps that nobody writes are left out."""
        steps = [root.label]
        if root.kind == "frame" and (name := self._names.get(self._graph.nodes[path[0]].ref)):
            steps.append(f" → {name}")
        self.types.setdefault(tuple(steps), self._type_of(path[0]))
        for parent, child in pairwise(path):
            if parent not in self._labels:
                self._labels[parent] = self._labels_of(parent)
            if label := self._labels[parent].get(child, ""):
                steps.append(label)
                self.types.setdefault(tuple(steps), self._type_of(child))
        return tuple(steps)

    def _type_of(self, node: int) -> str:
        name = self._graph.nodes[node].type_name
        return _LIST if name == _FASTCORES else name

    def _labels_of(self, parent: int) -> dict[int, str]:
        """Return the step to each child. The items of a deque or a set have none that one writes: they are numbered."""
        node = self._graph.nodes[parent]
        is_unwritten = node.type_name in _UNWRITTEN
        if node.type_name == _FASTCORES:
            return {child: "" if label == _ITEMS else label for child, label in node.references}
        return {child: f"[{at}]" if is_unwritten else label for at, (child, label) in enumerate(node.references)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The holder that grew most between two looks, in bytes."""

    holder: str  # the way to it as one would write it, e.g. "losses"
    root: RootKind = "name"  # the kind of the root where this way begins
    nbytes: int = 0  # of its growth between the two scans
    held: int = 0  # bytes that it held at the second
    is_graph: bool = False  # the autograd graphs of its tensors grow
    is_sum: bool = False  # it is one tensor, whose graph grows
    is_state: bool = False  # this tensor has more than one value: a state carried on, and no sum
    container: str = _LIST  # name of its class, `NESTED` or `JOINED`
    batches: int = 0  # training batches between the two looks
    is_retained: bool = False  # backward passes leave their graphs alive on purpose


_MAIN_PART = 0.7
"""Share of a holder's growth that must lie in one part of it to name that part."""


_ONE_VALUE = 16
"""Bytes of the largest dtype, complex128."""
NODE = 4 * KiB
"""Bytes of host memory that one node of an autograd graph may take at most, with its saved shapes and Python's wrapper."""
TENSOR = 512
"""Bytes that a tensor takes at most beside its values: on the heap its own objects, of a GPU the rest of a block."""


def explains(nbytes: int, expected: int) -> bool:
    """Say whether the growth of tensors explains the `expected` growth of memory, being at least half of it."""
    return nbytes >= expected / 2


def grown(before: HolderSizes, after: HolderSizes, expected: int) -> Grown | None:
    """Return the holder that grew most, as deep as one part of it has nearly all the growth, or None where none explains it.

    A holder explains the growth if its tensors, with their overhead, grew by at least half of the `expected`
    bytes. A graph that lost its tensors
    in the backward pass is made of nodes only: there the nodes must be enough. Memory that only libraries hold has grown where
    it had its name at the first scan, too.
    """
    after = _without_new_libraries(before, after)
    at, nbytes = _where(before.nbytes, after.nbytes)
    in_graphs, nodes = _where(before.nodes, after.nodes)
    of_nodes = in_graphs if in_graphs in before.nodes else _of_list(in_graphs)  # the state of an LSTM is a pair, and no list
    is_state = _is_state(after, of_nodes)
    of_graphs = _container(before, after, of_nodes)
    if not explains(nbytes + TENSOR * (_number(after, at) - _number(before, at)), expected):
        if not nodes or not explains(nodes * NODE, expected):
            return None
        return Grown(
            holder=_written(of_nodes),
            root=after.root(of_nodes),
            is_graph=True,
            is_sum=GRAPH in of_nodes,
            is_state=is_state,
            container=of_graphs,
        )
    if not at:
        return None
    at = _of_list(at)
    held = _total(after.nbytes, at)
    if GRAPH in at and GRAPH in of_nodes and nodes > 0:  # a graph's tensors are met on any way into it; its nodes are not
        return Grown(
            holder=_written(of_nodes),
            root=after.root(of_nodes),
            nbytes=nbytes,
            held=held,
            is_graph=True,
            is_sum=True,
            is_state=is_state,
            container=of_graphs,
        )
    graphs = _total(after.nbytes, at, GRAPH) - _total(before.nbytes, at, GRAPH)
    return Grown(
        holder=_written(at),
        root=after.root(at),
        nbytes=nbytes,
        held=held,
        is_graph=at[-1] == GRAPH or (GRAPH not in at and graphs > nbytes / 2),
        is_sum=GRAPH in at,
        container=_container(before, after, at),
    )


def _container(before: HolderSizes, after: HolderSizes, at: HolderPath) -> str:
    """Return the class of the grown object at a place: of a container that has the tensors itself, or of one tensor."""
    if GRAPH in at:
        tensor = _without_base(at[: at.index(GRAPH)])
        was, is_now = (sizes.nbytes.get(tensor, 0) for sizes in (before, after))
        return JOINED if 0 < was < is_now else _LIST
    inside = [place[len(at) :] for place in (*after.nbytes, *after.nodes) if place[: len(at)] == at]
    steps = [step[: step.index(GRAPH)] if GRAPH in step else step for step in inside]
    return NESTED if any(len(_without_base(step)) > 1 for step in steps) else after.types.get(at, _LIST)


def _without_new_libraries(before: HolderSizes, after: HolderSizes) -> HolderSizes:
    """Return the sizes of the second scan without libraries' holdings by names that the first scan did not know.

    Memory that only libraries hold may have another name in each scan.
    """
    known = {place[0] for place in (*before.nbytes, *before.nodes)}
    new = {label for label, kind in after.kinds.items() if kind == "library" and label not in known}
    nbytes, nodes = (
        {place: size for place, size in sizes.items() if place[0] not in new} for sizes in (after.nbytes, after.nodes)
    )
    return replace(after, nbytes=nbytes, nodes=nodes)


def _is_state(sizes: HolderSizes, at: HolderPath) -> bool:
    """Say whether the tensor whose graph lies at a place has more than one value."""
    tensor = at[: at.index(GRAPH)] if GRAPH in at else ()
    return bool(tensor) and max(sizes.nbytes.get(tensor, 0), sizes.nbytes.get(_without_base(tensor), 0)) > _ONE_VALUE


def _without_base(at: HolderPath) -> HolderPath:
    """Return the place of the view of a tensor, as the view has the name."""
    return at[:-1] if at[-1:] == (BASE,) else at


def _written(at: HolderPath) -> str:
    """Return a place as one would write it; steps to a graph at its end are left out."""
    while at[-1:] == (GRAPH,):
        at = at[:-1]
    return "".join(_without_base(at))


def _of_list(at: HolderPath) -> HolderPath:
    """Return the list of a place inside the graph of one of its tensors: new tensors are often met on the way of that one."""
    end = at.index(GRAPH) if GRAPH in at else 0
    return at[: end - 1] if end > 1 and re.fullmatch(_ITEM, at[end - 1]) else at


def _where(before: Mapping[HolderPath, int], after: Mapping[HolderPath, int]) -> tuple[HolderPath, int]:
    """Return the place whose size has grown most, as far down as one part of it grew, and by how much.

    A part that grew by more than the whole has got bytes that another part lost: a shared storage is met on one way only.
    """
    delta = {place: after.get(place, 0) - before.get(place, 0) for place in {*before, *after}}
    at: HolderPath = ()
    here = 0
    while inside := _below(delta, at):
        step, most = max(inside.items(), key=lambda part: part[1])
        if most <= 0 or (at and not _MAIN_PART * here <= most <= here):
            break
        at, here = (*at, step), most
    return at, here


def _number(sizes: HolderSizes, at: HolderPath) -> int:
    """Return how many tensors there are at a place and below."""
    return sum(place[: len(at)] == at for place in sizes.nbytes)


def _total(sizes: Mapping[HolderPath, int], at: HolderPath, through: str = "") -> int:
    return sum(size for place, size in sizes.items() if place[: len(at)] == at and (not through or through in place))


def _below(sizes: Mapping[HolderPath, int], at: HolderPath) -> dict[str, int]:
    """Return the bytes of each next step from a place."""
    sizes_below: dict[str, int] = {}
    for place, nbytes in sizes.items():
        if len(place) > len(at) and place[: len(at)] == at:
            sizes_below[place[len(at)]] = sizes_below.get(place[len(at)], 0) + nbytes
    return sizes_below


def keepers(sizes: HolderSizes, least: int) -> list[tuple[str, int, str]]:
    """Return the containers that hold at least `least` tensors with a graph of their own, the most first.

    Each with their number and its class. Of containers in each other the inner one is named, `history['train']`, or, where
    each of these has too few, the one around them.
    """
    inside = {place[:-1] for place in sizes.nodes}
    found: dict[HolderPath, int] = {}
    for depth in range(max(map(len, inside), default=0) - 1, 0, -1):
        counts: dict[HolderPath, list[HolderPath]] = {}
        for place in inside:
            if len(place) > depth and all(step.startswith("[") for step in place[depth:]):
                counts.setdefault(place[:depth], []).append(place)
        for container, places in counts.items():
            if len(places) >= least:
                found[container] = len(places)
                inside.difference_update(places)
    many = [("".join(place), count, _container(sizes, sizes, place)) for place, count in found.items()]
    return sorted(many, key=lambda holder: (-holder[1], holder[0]))
