"""A look after the fit for names that keep the graphs of its batches: also those too small to be seen by their bytes."""

from __future__ import annotations

from dataclasses import replace

from nbguard.profiler.analysis.memory.growth import ENOUGH, KeptGraphs
from nbguard.profiler.analysis.memory.holders import holder_sizes, keepers
from nbguard.scan.scan import Notebook, scan


def kept_graphs() -> tuple[KeptGraphs, ...]:
    """Return the names that hold many tensors with a graph of their own, the one with the most first."""
    graph = scan(Notebook.current()).facts.graph
    names = tuple(root for root in graph.roots if root.kind == "name")
    return tuple(KeptGraphs(name, count) for name, count in keepers(holder_sizes(replace(graph, roots=names), {}), ENOUGH))
