"""One analysis of a scan: each answer is computed once, and all that is shown of one state agrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state
from nbguard.memory.cleanup.plan import parking
from nbguard.memory.cleanup.plan.parking import default_plan, holders_of
from nbguard.memory.core import analysis as memory_analysis
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.out_of_memory import card
from nbguard.memory.reports.memory_map import build_map
from nbguard.memory.reports.report import build_report
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment
from nbguard.units import MiB
from tests.sidebar.protocol.scenes import SCENES


def after_an_error() -> Facts:
    """Return facts of one device that is fragmented and ran out: names, something displayed, something in the last error."""
    names = {"a": 300 * MiB, "b": 200 * MiB, "o": 90 * MiB, "x": 60 * MiB}
    graph = make_graph(
        {"a": ["a"], "b": ["b"], "Out[3]": ["o"], "last error": ["f"]},
        {"f": {" → xb": "x"}},
        names,
        {"o": "learner", "f": "frame", "x": "tensor"},
        device="cuda:0",
    )
    segments = [
        make_segment((storage.nbytes, "active_allocated"), (30 * MiB, "inactive"), address=storage.address)
        for storage in graph.storages
    ]
    facts = make_facts(graph, device=make_cuda_device(segments, 1000 * MiB, 20 * MiB))
    return replace(facts, tracked="cuda", oom=OomFact(device="cuda:0", requested=150 * MiB, cell=5))


PURE = {
    "holders": (memory_analysis, "holdings"),
    "pools": (memory_analysis, "pools_of"),
    "pools in use": (memory_analysis, "pools_in_use"),
    "fragmentation": (memory_analysis, "fragmentation"),
    "units": (memory_analysis, "units"),
    "all holders": (parking, "all_holders"),
    "pins": (parking, "pins_of_holders"),
    "parts": (parking, "parts_of"),
    "default plan": (parking, "plan_cleanup"),
    "fixes of the card": (card, "fixes"),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the functions that answers are computed by."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name, (module, function) in PURE.items():
        monkeypatch.setattr(module, function, counted(name, getattr(module, function)))
    return counts


def test_a_report_computes_each_answer_once(calls: Counter[str]) -> None:
    report = build_report(Analysis(after_an_error()))

    assert {finding.kind for finding in report.findings} >= {"oom", "stale", "fragmentation"}
    assert calls == dict.fromkeys(PURE, 1)


def test_a_message_of_the_sidebar_computes_each_answer_once(calls: Counter[str]) -> None:
    heap, _ = build_memory_state(Analysis(after_an_error()), "b00t", 1, t=0.0, seconds=0.0, cell=5)

    assert heap.oom is not None
    assert heap.devices
    once = dict.fromkeys(PURE, 1)
    del once["pools"]
    assert calls == once, "the parts are those of the card; pools by name are not sent"


def test_report_card_map_and_sidebar_of_one_analysis_compute_each_answer_once(calls: Counter[str]) -> None:
    analysis = Analysis(after_an_error())

    build_report(analysis)
    build_memory_state(analysis, "b00t", 1, t=0.0, seconds=0.0, cell=5)
    build_map(analysis, 400 * MiB)
    analysis.once(card.build_card)

    assert calls == dict.fromkeys(PURE, 1)


def test_beside_running_code_the_plan_is_the_same(calls: Counter[str]) -> None:
    """The rows are those of another graph, in which a running function holds only what no name leads to."""
    facts = SCENES["training"]().facts
    heap, _ = build_memory_state(Analysis(facts), "b00t", 1, t=0.0, seconds=0.0, cell=5)

    assert calls["default plan"] == 1
    assert calls["holders"] == 2
    assert heap.stale == Analysis(facts).once(default_plan).promised


def test_an_answer_is_computed_when_it_is_asked_for_and_never_again() -> None:
    asked: list[Analysis] = []

    def question(analysis: Analysis) -> int:
        asked.append(analysis)
        return len(asked)

    analysis = Analysis(after_an_error())
    assert (analysis.once(question), analysis.once(question)) == (1, 1)
    assert asked == [analysis]
    other = analysis.with_graph(analysis.facts.graph, question)
    assert other.once(question) == 1
    assert other.once(default_plan) is not analysis.once(default_plan)


def test_holders_of_a_device_are_those_of_all_devices_where_it_is_the_only_one() -> None:
    facts = after_an_error()
    (device,) = (alone := Analysis(facts)).devices
    assert device.holdings is alone.holdings

    graph = facts.graph
    two = replace(facts, graph=replace(graph, storages=(replace(graph.storages[0], device="cuda:1"), *graph.storages[1:])))
    first = Analysis(two).devices[0]

    assert first.holdings != first.analysis.holdings
    assert "a" not in {holder.label for holder in first.once(holders_of) if holder.retained}
