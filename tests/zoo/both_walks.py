"""One heap, walked by the compiled part and by Python, in the kernel of a case: both find the same."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.core.facts import Graph
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.scan import Notebook, scan

_MOST = 8
"""Scans after the first until the heap rests: Python makes dicts of finished frames' variables, and collects garbage."""


def compare() -> None:
    """Raise AssertionError where a graph differs from the two that the other walk found before and after it, which agree."""
    if native.compiled is None:
        return
    scan(Notebook.current())
    former, last = _graph(by_python=True), _graph(by_python=False)
    for number in range(_MOST):
        former, last, found = last, _graph(by_python=number % 2 == 0), former
        if found == last:
            assert former.roots == last.roots
            assert former.storages == last.storages
            for mine, others in zip(former.nodes, last.nodes, strict=True):
                assert mine == others
            return
    raise AssertionError("the heap did not rest")


def _graph(*, by_python: bool) -> Graph:
    """Return the graph without addresses: some objects are made by the scan itself."""
    compiled = native.compiled
    native.compiled = None if by_python else compiled
    try:
        graph = scan(Notebook.current()).facts.graph
    finally:
        native.compiled = compiled
    return replace(graph, nodes=tuple(replace(node, ref=0) for node in graph.nodes))
