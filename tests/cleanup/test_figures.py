"""One figure for a name: any graph, what the rows of a report say, the panel's, the plan's, and what has to go together."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state
from nbguard.memory.cleanup.figures import figure_of, holdings_of, targets_of_roots, way_out
from nbguard.memory.cleanup.plan.parking import holders_of
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.cleanup.plan.promises import freed_by
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.device_view import holder_row
from nbguard.memory.core.facts import Graph, Target
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_facts, make_graph
from nbguard.units import MiB
from tests.cleanup.test_plan_properties import graphs
from tests.thorough import examples


def _large(graph: Graph) -> Graph:
    return replace(graph, storages=tuple(replace(storage, nbytes=storage.nbytes * MiB) for storage in graph.storages))


def _promised(graph: Graph, *labels: str, is_for_later: bool = False) -> int:
    targets = tuple(Target(text=label, root=label, value_kind="object") for label in labels)
    return plan_cleanup(make_facts(graph), Request(targets=targets), is_for_later=is_for_later).promised


@settings(max_examples=examples(300))
@given(graphs())
def test_a_name_has_one_figure_which_is_the_plans(graph: Graph) -> None:
    graph = _large(graph)
    analysis = Analysis(make_facts(graph))
    (device,) = analysis.devices
    rows = device.once(holders_of)
    reported = {row.roots: row for row in build_report(analysis).devices[0].holders}
    heap, panel = build_memory_state(analysis, "b00t", 1, t=0.0, seconds=0.0, cell=None)
    labels = {root.label for root in graph.roots}
    roots = {storage for root in graph.roots for node in _reach(graph, root.nodes) for storage in graph.nodes[node].storages}

    assert sum(row.retained for row in rows) == sum(graph.storages[storage].nbytes for storage in roots)
    for row in rows:
        assert reported[row.roots] == row
        if row.is_shared or not targets_of_roots(graph, row.roots):
            continue
        _agree(analysis, graph, row)
    for shown in heap.holders:
        released = panel.texts("release", [shown.id]) or ()
        if released and labels.issuperset(released):
            assert shown.frees == _promised(graph, *released, is_for_later=True)  # as the panel's plan is


@settings(max_examples=examples(300))
@given(graphs())
def test_the_line_beside_shared_memory_frees_some_of_it(graph: Graph) -> None:
    graph = _large(graph)
    analysis = Analysis(make_facts(graph))
    for row, storages in analysis.once(holdings_of):
        line = way_out(analysis, row)
        if row.is_shared and line.targets:
            assert storages & (freed_by(analysis.facts, (line,)) or set())


def test_the_line_for_shared_memory_includes_the_displayed_results_that_keep_it() -> None:
    graph = make_graph(
        {"model": ["weight"], "opt": ["weight", "state"], "Out[2]": ["loss"]},
        {"loss": {" → graph": "weight"}},
        {"weight": 8 * MiB, "state": 16 * MiB, "loss": 4},
    )
    analysis = Analysis(make_facts(graph))
    row = next(row for row, _ in analysis.once(holdings_of) if row.is_shared)

    assert row.together == way_out(analysis, row)
    assert row.together.command == "%reset_gpu model opt Out[2]"
    assert row.together.frees == 24 * MiB + 4


def test_stale_memory_that_leads_to_a_name_is_no_memory_of_the_name() -> None:
    """Of an earlier error with the batch in its frame: the batch's row would be larger than the batch."""
    graph = make_graph(
        {"data": ["data"], "unreachable cycles": ["earlier"]},
        {"earlier": {" → kept": "kept", " → x": "data"}},
        {"data": 200 * MiB, "kept": 250 * MiB},
    )
    analysis = Analysis(make_facts(graph))

    rows = {row.label: row.retained // MiB for row, _ in analysis.once(holdings_of)}

    assert rows == {"unreachable cycles": 250, "data": 200}
    assert figure_of(analysis, (Target(text="data", root="data"),)).frees == 450 * MiB, "the collector takes all of a cycle"


def test_a_name_that_a_functions_cache_keeps_frees_nothing_alone() -> None:
    graph = make_graph(
        {"kernel": ["cache"], "k": ["tensor"]},
        {"cache": {" → Tensor": "tensor"}},
        {"tensor": 2 * MiB},
        types={"cache": "_lru_cache_wrapper"},
    )
    analysis = Analysis(make_facts(graph))
    row = next(row for row, _ in analysis.once(holdings_of) if row.names == ("k",))
    heap, panel = build_memory_state(analysis, "b00t", 1, t=0.0, seconds=0.0, cell=None)
    (shown,) = [shown for shown in heap.holders if shown.label == "k"]

    assert (row.frees, row.together.command, row.together.frees) == (0, "%reset_gpu k --caches", 2 * MiB)
    assert panel.texts("release", [shown.id]) == ("k",)
    assert shown.frees == 0, "the panel's release empties no cache"
    assert holder_row(row, "0", (1, "B")).cells[-1].startswith("with the cache that keeps it: 2 MiB")


def _agree(analysis: Analysis, graph: Graph, row: Holder) -> None:
    plan = _promised(graph, *row.names)
    assert row.frees == plan
    figure = figure_of(analysis, tuple(Target(text=name, root=name) for name in row.names))
    assert (figure.frees, figure.together) == (row.frees, row.together)
    if row.together.command and {root.label for root in graph.roots}.issuperset(row.together.targets):
        assert row.together.frees == _promised(graph, *row.together.targets)


def _reach(graph: Graph, entries: tuple[int, ...]) -> set[int]:
    found, todo = set[int](), list(entries)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += graph.nodes[node].children
    return found
