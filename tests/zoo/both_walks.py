"""One heap, found in two ways in the kernel of a case: by both walks, and after a cleanup by a scan and by the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbguard.memory.cleanup.apply import apply
from nbguard.memory.cleanup.plan.plan import Plan
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.scan import Notebook, scan

_MOST = 8
"""Scans after the first until the heap rests: Python makes dicts of finished frames' variables, and collects garbage."""


def compare() -> None:
    """Compare the walks now, and the ways to the outcome in each cleanup from now on."""
    compare_walks()
    compare_cleanups()


def compare_walks() -> None:
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


def compare_cleanups() -> None:
    """Have each cleanup that foresees the holders left, instead of a second scan, raise AssertionError if that finds others."""
    foreseen = apply.foreseen

    def compared(plan: Plan, facts: Facts) -> Analysis:
        """Return the analysis that the cleanup goes on with."""
        analysis = foreseen(plan, facts)
        expected, found = _left(analysis), _left(scan(Notebook.current()).analysis)
        assert expected == found, (expected, found)
        return analysis

    apply.foreseen = compared


def _left(analysis: Analysis) -> list[Any]:
    return [(each.label, each.nbytes, each.what, each.advice.command, each.advice.frees) for each in apply._left(analysis)]


def _graph(*, by_python: bool) -> Graph:
    """Return the graph without addresses: some objects are made by the scan itself."""
    compiled = native.compiled
    native.compiled = None if by_python else compiled
    try:
        graph = scan(Notebook.current()).facts.graph
    finally:
        native.compiled = compiled
    return replace(graph, nodes=tuple(replace(node, ref=0) for node in graph.nodes))
