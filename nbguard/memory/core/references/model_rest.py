"""Tensors that a model's code put on it, which are neither parameter nor buffer nor gradient."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.libraries import attributes_of_kind
from nbguard.memory.core.advice import NONE, Advice, empty_parts, is_python, release_names
from nbguard.memory.core.facts import Graph, Root
from nbguard.memory.core.references.graph import GRADIENT, Edge, nbytes_of, path_text, reach, shortest_path, storages_of
from nbguard.units import format_bytes

_CONTAINERS = frozenset({"list", "dict", "deque", "set", "OrderedDict", "defaultdict"})
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
    advice: Advice  # lets go of tensors with a graph, and leaves the model; a table or a buffer may be needed
    hooks: Advice = NONE  # takes the hooks off that keep something

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
        graphs = ": tensors with a graph" if any(place.has_graph for place in self.places) else ""
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
    places, edges, lines, hooks = [], set[Edge](), [], dict[str, Edge]()
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
                is_container=node.type_name in _CONTAINERS,
            )
        )
        if path.endswith("_hooks"):
            hooks |= {f"{path}{label}": (edge[1], child) for child, label in node.references if label}
        if places[-1].has_graph and "_hooks" not in path and is_python(f"{path} = None"):
            lines.append((path, node.type_name in _CONTAINERS))
            edges |= {(edge[1], child) for child in node.children} if node.type_name in _CONTAINERS else {edge}
    places.sort(key=lambda place: -place.nbytes)
    if not places:
        return None
    line = empty_parts(root.module, lines, frozenset(edges)) if 0 < len(lines) <= _LINES else NONE
    return ModelContents(
        parameters=nbytes_of(graph, own.parameters),
        buffers=nbytes_of(graph, own.buffers - own.parameters),
        gradients=nbytes_of(graph, own.gradients - own.parameters - own.buffers),
        optimizer=nbytes_of(graph, _optimizer_state(graph, root) - of_model - rest),
        rest=nbytes_of(graph, rest),
        places=tuple(places),
        advice=line,
        hooks=replace(release_names(list(hooks)), cut=frozenset(hooks.values())) if 0 < len(hooks) <= _LINES else NONE,
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
                    self.nodes.add(child)
                    below = graph.nodes[child].children
                    if part == "modules":
                        todo.extend(below)
                    else:
                        self._take(part, below)
                else:
                    rest.append((space, child))
        yield from (edge for edge in rest if edge[1] not in self.nodes)

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
