"""A look after the fit for containers that keep the graphs of its batches: also those too small to be seen by their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nbguard.profiler.analysis.memory.growth import ENOUGH, kept_graphs
from nbguard.profiler.analysis.memory.holders import holder_sizes, keepers
from nbguard.profiler.analysis.report import FitFinding
from nbguard.scan.scan import Notebook, scan


def graphs_left(batches: int) -> Iterator[FitFinding]:
    """Yield a finding for each name that keeps graphs of at least half of so many training batches."""
    if batches < ENOUGH:
        return
    graph = scan(Notebook.current()).facts.graph
    names = tuple(root for root in graph.roots if root.kind == "name")
    found = holder_sizes(replace(graph, roots=names), {})
    for name, count in keepers(found, max(ENOUGH, batches // 2)):
        yield kept_graphs(name, count, batches)
