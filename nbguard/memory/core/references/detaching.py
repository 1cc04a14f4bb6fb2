"""The line that takes a name's tensors off their autograd graphs, and leaves their values."""

from __future__ import annotations

from nbguard.memory.core import advice
from nbguard.memory.core.advice import NONE, Advice
from nbguard.memory.core.facts import Graph, Root
from nbguard.memory.core.references.graph import Edge, reach

_CONTAINERS = {"list": "list", "dict": "dict", "defaultdict": "dict", "OrderedDict": "dict"}
"""Containers that take other values for all that they have, by the names of their classes."""


def detached(graph: Graph, root: Root) -> Advice:
    """Return the line that detaches a tensor with a name, or all values of a container; `NONE` if there is no such line.

    A container has one only if each of its values is a tensor. Tensors that something else leads to keep their graphs, so
    nothing of these is cut.
    """
    if root.kind != "name" or len(root.nodes) != 1:
        return NONE
    number = root.nodes[0]
    node = graph.nodes[number]
    container = _CONTAINERS.get(node.type_name, "")
    tensors = node.children if container else root.nodes
    if any(graph.nodes[n].kind != "tensor" for n in tensors):
        return NONE
    if container and root.what != f"{node.type_name} of {len(tensors) + len(node.repeated)}":  # numbers, or tensors elsewhere
        return NONE
    others = [each for other in graph.roots if other is not root for each in other.nodes]
    shared = reach(graph, others, {(number, n) for n in tensors} if container else set[Edge]())
    cut = {
        (n, child)
        for n in tensors
        if n not in shared and any(graph.nodes[child].kind == "graph" for child in graph.nodes[n].children)
        for child in graph.nodes[n].children
    }
    return advice.detach(root.label, container, frozenset(cut)) if cut else NONE
