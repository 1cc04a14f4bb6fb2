"""A container that the failed run filled, such as the list of outputs that grows with each batch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbguard.memory.core.facts import Graph, Root
from nbguard.memory.core.references.graph import GRAPH, nbytes_of, path_text, reach, shortest_path, storages_of
from nbguard.memory.out_of_memory.rerun import Rerun
from nbguard.units import format_bytes

_CONTAINERS = frozenset({"list", "dict", "deque", "defaultdict"})
_OF_LIBRARIES = {
    "EvalLoopContainer": "`TrainingArguments(eval_accumulation_steps=1)` moves them to host memory after each batch, a larger "
    "number more rarely; `prediction_loss_only=True` keeps none, where no metric needs them",
}
"""Containers of a library's own loop for a model's outputs, by their classes, and the way to keep them small."""
_FEWEST = 3
"""Least elements of a container that is said to grow."""
_MOST = 4
"""Least share, a quarter, of the failed run's bytes that it holds."""
_LAST_NAME = re.compile(r"(\w+)(?:\[[^\[\]]*\])*$")
"""The name in front of the subscripts at the end of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """The container, as one would write it, and its contents."""

    name: str
    elements: int  # 0 if joined to one tensor
    nbytes: int  # where the request was made
    keeps_graph: bool = False  # its elements keep autograd graphs
    less: str = ""  # the way to have a library keep less; "": the user's own loop fills it

    def words(self, *, trains: bool) -> str:
        """Return the words on the growing container, its growth, and the remedy. `trains`: the run calls backward."""
        number = f"{self.elements} tensors, " if self.elements else ""
        own = "append loss.item() or t.detach()" if self.keeps_graph and trains else "append t.detach().cpu(), or keep less"
        return f"{self.name} grows: {number}{format_bytes(self.nbytes)} by now; {self.less or own}"


def growing_container(rerun: Rerun) -> Growing | None:
    """Return the container that holds most of the failed run's remaining bytes, or None.

    It is one of tensors other than parameters, and a loop of the run put them there, or a library's own loop: it is in a
    variable of a frame of the error, or in a name that the run uses. Tensors that autograd's graphs keep are none.
    """
    facts, oom = rerun.request.facts, rerun.request.oom
    graph, found = facts.graph, list[tuple[int, Growing]]()
    for root in graph.roots:
        if root.kind != "error" and not (root.kind == "name" and root.label in {*oom.uses, *oom.bound}):
            continue
        for number in reach(graph, root.nodes):
            name = graph.nodes[number].type_name
            grows = _growing if name in _CONTAINERS else _of_library if name in _OF_LIBRARIES else None
            if grows is not None and (one := grows(rerun, graph, root, number)) is not None:
                found.append((one.nbytes, one))
    most = max(found, key=lambda one: one[0], default=(0, None))
    return most[1] if most[0] * _MOST >= max(rerun.own_bytes, rerun.taken, 1) else None


def _growing(rerun: Rerun, graph: Graph, root: Root, number: int) -> Growing | None:
    parameters = {n for n, node in enumerate(graph.nodes) if node.type_name == "Parameter"}
    tensors = [n for n in graph.nodes[number].children if graph.nodes[n].kind == "tensor" and n not in parameters]
    if len(tensors) < _FEWEST:
        return None
    path = shortest_path(graph, root, {number})
    text = path_text(graph, root, path)
    last = _LAST_NAME.search(text)
    if GRAPH in text or last is None or last[1] not in rerun.request.oom.fills:
        return None
    nbytes = rerun.request.nbytes_here(storages_of(graph, reach(graph, tensors, blocked=parameters)))
    shown = {storage for child in tensors for storage in graph.nodes[child].storages}
    keeps_graph = nbytes_of(graph, shown) < nbytes and any(
        graph.nodes[n].kind == "graph" for child in tensors for n in graph.nodes[child].children
    )
    text = path_text(graph, root, path, shorten=4)
    return Growing(name=text, elements=len(tensors), nbytes=nbytes, keeps_graph=keeps_graph)


def _of_library(rerun: Rerun, graph: Graph, root: Root, number: int) -> Growing | None:
    nbytes = rerun.request.nbytes_here(storages_of(graph, reach(graph, {number})))
    text = path_text(graph, root, shortest_path(graph, root, {number}), shorten=4)
    return Growing(name=text, elements=0, nbytes=nbytes, less=_OF_LIBRARIES[graph.nodes[number].type_name])
