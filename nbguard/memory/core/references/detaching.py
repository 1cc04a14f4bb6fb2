"""The line that takes a name's tensors off their autograd graphs, and leaves their values."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbguard.memory.core import advice
from nbguard.memory.core.advice import NONE, Advice, is_python
from nbguard.memory.core.facts import Graph, Root
from nbguard.memory.core.references.graph import BASE, Edge, path_text, reach, shortest_paths

_CONTAINERS = {"list": "list", "dict": "dict", "defaultdict": "dict", "OrderedDict": "dict"}
"""Containers that take other values for all that they have, by the names of their classes."""
_MOST = 1000
"""Most tensors that one line detaches where they are."""
_FEW = 3
"""Most of them that it names one by one."""


def detached(graph: Graph, root: Root) -> Advice:
    """Return the line that detaches a tensor with a name, or all tensors of a container; `NONE` if there is no such line.

    A container has a line for its values only if each of them is a tensor; of others, such as a list of dicts, the tensors
    are detached where they are. Tensors that something else leads to keep their graphs, so nothing of these is cut.
    """
    if root.kind != "name" or len(root.nodes) != 1:
        return NONE
    number = root.nodes[0]
    node = graph.nodes[number]
    container = _CONTAINERS.get(node.type_name, "")
    tensors = node.children if container else root.nodes
    is_all = root.what == f"{node.type_name} of {len(tensors) + len(node.repeated)}"  # else numbers, or tensors elsewhere
    if any(graph.nodes[n].kind != "tensor" for n in tensors) or (container and not is_all):
        return _in_place(graph, root)
    others = [each for other in graph.roots if other is not root for each in other.nodes]
    shared = reach(graph, others, {(number, n) for n in tensors} if container else set[Edge]())
    cut = {edge for n in tensors if n not in shared for edge in _graph_edges(graph, n)}
    return advice.detach(root.label, container, frozenset(cut)) if cut else NONE


def _graph_edges(graph: Graph, tensor: int) -> set[Edge]:
    """Return the references of a tensor that has a graph, which a detached one has no more; none of one without."""
    children = graph.nodes[tensor].children
    return {(tensor, child) for child in children} if any(graph.nodes[child].kind == "graph" for child in children) else set()


def _in_place(graph: Graph, root: Root) -> Advice:
    """Return the line that detaches the tensors behind a name where they are, which no view allows.

    There is none where one of them has another holder, whose graph would go, too.
    """
    graphs = {n for n, node in enumerate(graph.nodes) if node.kind == "graph"}
    reached = reach(graph, root.nodes, blocked=graphs)
    tensors = {n for n in reached if graph.nodes[n].kind == "tensor" and _graph_edges(graph, n)}
    others = reach(graph, (each for other in graph.roots if other is not root for each in other.nodes))
    is_fixed = any(label.startswith(BASE) for n in tensors for label in graph.nodes[n].labels)
    if not tensors or len(tensors) > _MOST or is_fixed or tensors & others:
        return NONE
    ways = shortest_paths(graph, root, tensors, graphs)
    texts = [path_text(graph, root, ways[n]) for n in sorted(tensors) if n in ways]
    written = _written(texts) if len(texts) == len(tensors) and all(map(is_python, texts)) else ""
    cut = frozenset(edge for n in tensors for edge in _graph_edges(graph, n))
    return advice.detach_in_place(written, cut) if written else NONE


def _written(texts: Sequence[str]) -> str:
    """Return code that detaches tensors by their paths: one by one, or by a key that counts from one to the next."""
    if len(texts) <= _FEW:
        return "; ".join(f"{text}.detach_()" for text in texts)
    for key in re.finditer(r"\[\d+\]", texts[0]):
        before, after = texts[0][: key.start()], texts[0][key.end() :]
        pattern = re.compile(re.escape(before) + r"\[(\d+)\]" + re.escape(after))
        numbers = {int(found[1]) for text in texts if (found := pattern.fullmatch(text))}
        first, last = min(numbers), max(numbers)
        if len(numbers) == len(texts) == last - first + 1:
            counted = f"range({last + 1})" if not first else f"range({first}, {last + 1})"
            return f"[{before}[n]{after}.detach_() for n in {counted}]"
    return ""
