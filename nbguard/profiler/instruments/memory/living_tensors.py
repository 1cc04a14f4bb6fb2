"""A short look at the memory of the tensors that live. A whole look at the process takes some 20 times as long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbguard.profiler.analysis.memory.holders import NODE, TENSOR
from nbguard.scan.heap.autograd import Autograd
from nbguard.scan.heap.graphs import Graphs
from nbguard.scan.heap.kinds import Kinds

_MOST_NODES = 3000
"""Nodes of graphs that a look goes into: a model of some hundred layers has that many in a batch."""


def living_nbytes() -> int | None:
    """Return the bytes that tensors, their graphs and what these have saved take at most; None: too many to go through."""
    autograd, kinds = Autograd(), Kinds()
    tensors = kinds.tracked({"tensor"})
    graphs = Graphs(autograd, kinds, _MOST_NODES)
    nodes: dict[int, Any] = {}

    def link(_: Any, node: Any) -> None:
        nodes[id(node)] = node

    for tensor in filter(autograd.has_graph, tensors):
        root = graphs.root_of(tensor)
        if root is not None:
            nodes[id(root)] = root
            graphs.walk(root, link, _ignore)
    if graphs.cut:
        return None
    saved = (value for node in nodes.values() for value in autograd.graph_referents(node))
    tensors += [value for value in saved if kinds.of(type(value)) == "tensor"]
    return len(nodes) * NODE + len(tensors) * TENSOR + _nbytes(autograd, tensors)


def _nbytes(autograd: Autograd, tensors: Iterable[Any]) -> int:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        try:
            storage = autograd.storage(tensor)
            sizes[storage._cdata] = storage.nbytes()
        except (RuntimeError, AttributeError):  # sparse and wrapper tensors have no storage of their own
            continue
    return sum(sizes.values())


def _ignore(_: Any) -> None:
    """Do nothing: what is not gone into is counted in `Graphs.cut`."""
