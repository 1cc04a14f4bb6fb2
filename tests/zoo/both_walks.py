"""One heap, walked by the compiled part and by Python, in the kernel of a case: both find the same."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.core.facts import Graph
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.scan import Notebook, scan


def compare() -> None:
    """Raise AssertionError where the graphs differ. At the first two scans Python makes dicts of finished frames' variables."""
    if native.compiled is None:
        return
    for _ in range(2):
        scan(Notebook.current())
    compiled, native.compiled = native.compiled, None
    try:
        by_python = _graph()
    finally:
        native.compiled = compiled
    found = _graph()
    assert found.roots == by_python.roots
    assert found.storages == by_python.storages
    for mine, pythons in zip(found.nodes, by_python.nodes, strict=True):
        assert mine == pythons


def _graph() -> Graph:
    """Return the graph without addresses: some objects are made by the scan itself."""
    graph = scan(Notebook.current()).facts.graph
    return replace(graph, nodes=tuple(replace(node, ref=0) for node in graph.nodes))
