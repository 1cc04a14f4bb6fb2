"""Whose workers may be ended, by which name, and what a plan says of it: on graphs small enough to see through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.cleanup.plan.optional_steps import worker_sets
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph, ParkedFact, PinnedFacts, Target, Unavailable
from nbguard.memory.core.processes import Process, WorkersFact
from nbguard.memory.reports.findings import find
from nbguard.testing import make_facts, make_graph

MIB = 1 << 20
_PAIR = (Process(12, 1.0), Process(13, 2.0))
_KINDS = {"dl": "loader", "it": "iterator", "learn": "learner", "err": "traceback"}
_KEPT = {"dl": {".dataset": "data", "._iterator": "it"}, "it": {"._task_info": "batch"}}


def _facts(roots: dict[str, list[str]], edges: dict[str, dict[str, str]] = _KEPT, **fact: object) -> Facts:
    graph = make_graph(roots, edges, {"batch": 5 * MIB, "data": MIB}, _KINDS)
    node = {each.kind: number for number, each in enumerate(graph.nodes)}
    loaders = (node["loader"],) if "._iterator" in edges.get("dl", {}) else ()
    workers = WorkersFact(node=node["iterator"], processes=_PAIR, loaders=loaders, private=3 * MIB, shared=MIB)
    return replace(make_facts(graph), workers=(replace(workers, **fact),))  # type: ignore[arg-type]


def _plan(facts: Facts, **request: object) -> Plan:
    return plan_cleanup(facts, Request(workers=True, **request))  # type: ignore[arg-type]


def _workers(plan: Plan) -> list[str]:
    return [action.label for action in plan.actions if action.kind == "workers"]


def test_idle_workers_go_with_what_only_their_iterator_holds() -> None:
    facts = _facts({"dl": ["dl"]})

    plan = _plan(facts)

    assert [found.use for found in worker_sets(facts)] == ["idle"]
    assert _workers(plan) == ["2 workers of dl ended"]
    assert plan.promised == 5 * MIB == plan.actions[0].nbytes
    assert plan.actions[0].host == 4 * MIB
    assert plan.actions[0].processes == _PAIR
    assert plan.actions[0].detail == "pids 12, 13, 4 MiB of host memory; the next epoch starts new ones"


def test_only_on_request() -> None:
    assert [action.kind for action in plan_cleanup(_facts({"dl": ["dl"]}), Request()).actions] == ["collect"]


def test_what_a_name_still_reaches_is_not_promised() -> None:
    facts = _facts({"dl": ["dl"], "it": ["it"]}, is_midway=True)

    plan = _plan(facts)

    assert worker_sets(facts)[0].use == "held"
    assert _workers(plan) == ["2 workers of it ended"]
    assert "in mid-epoch: the remaining batches are lost" in plan.actions[0].detail
    assert plan.promised == 0


def test_a_finished_epoch_is_nobodys_state_even_if_named() -> None:
    assert worker_sets(_facts({"dl": ["dl"], "it": ["it"]}))[0].use == "idle"


@pytest.mark.parametrize(
    ("roots", "fact"),
    [
        ({"dl": ["dl"]}, {"is_in_use": True}),
        ({"dl": ["dl"], "running fit() in thread T": ["learn"]}, {}),
        ({"dl": ["dl"], "running f()": ["it"]}, {}),
        ({"last error": ["err"], "running f()": ["it"]}, {"is_midway": True}),
    ],
)
def test_what_is_in_use_stays_and_is_said_to(roots: dict[str, list[str]], fact: dict[str, object]) -> None:
    facts = _facts(roots, {**_KEPT, "learn": {".dls": "dl"}, "err": {" → it": "it"}}, **fact)

    plan = _plan(facts)

    assert _workers(plan) == []
    assert plan.promised == 0 or "last error" in roots
    assert any("2 workers of" in words and "keep running: running code uses them" in words for words in plan.skipped)
    assert not [each for each in find(Analysis(facts)) if each.kind == "workers"]


def test_only_a_library_knows_them_so_they_stay() -> None:
    facts = _facts({"dl": ["data"]}, {"it": {"": "batch"}, "dl": {"": "data"}})
    graph = facts.graph
    roots = (*graph.roots, replace(graph.roots[0], kind="library", label="x.y", nodes=(facts.workers[0].node or 0,)))

    facts = replace(facts, graph=Graph(roots, graph.nodes, graph.storages))

    assert (worker_sets(facts)[0].use, worker_sets(facts)[0].label) == ("in use", "a DataLoader")


def test_workers_of_a_stale_iterator_and_of_none() -> None:
    stale = _facts({"last error": ["err"]}, {"err": {" → it": "it"}, "it": {"": "batch"}, "dl": {}})
    gone = replace(stale, workers=(WorkersFact(node=None, processes=_PAIR),))

    assert _workers(_plan(stale)) == ["2 workers of last error → it ended"]
    assert _workers(_plan(gone)) == ["2 workers of an iterator that is gone ended"]
    assert _plan(gone).actions[0].refs == ()
    assert "though no name leads to them" in " ".join(each.sentence for each in find(Analysis(gone)))


def test_targets_narrow_it_down() -> None:
    facts = _facts({"dl": ["dl"], "other": ["data"]})

    assert _workers(_plan(facts, targets=(Target(text="other", root="other"),))) == []
    assert _workers(_plan(facts, targets=(Target(text="dl", root="dl"),))) == ["2 workers of dl ended"]
    assert _workers(_plan(facts, everything=True)) == ["2 workers of dl ended"]


def test_little_that_is_kept_is_no_finding() -> None:
    """Below 1 MiB, or a hundredth of all, there is none; workers whose memory is not known have one."""
    parked = (ParkedFact("small", "cuda:0", MIB - 1, 1), ParkedFact("large", "cuda:0", MIB, 1))
    facts = replace(_facts({"dl": ["dl"]}), parked=parked)
    little = replace(facts, workers=tuple(replace(one, private=MIB - 1, shared=0) for one in facts.workers))
    unknown = replace(facts, workers=tuple(replace(one, private=None) for one in facts.workers))

    assert [one.sentence.split()[0] for one in find(Analysis(facts)) if one.kind == "parked"] == ["large"]
    assert [one for one in find(Analysis(little)) if one.kind == "workers"] == []
    assert [one for one in find(Analysis(unknown)) if one.kind == "workers"] != []


def test_findings_name_the_command() -> None:
    (idle,) = (each for each in find(Analysis(_facts({"dl": ["dl"]}))) if each.kind == "workers")
    (alone,) = (
        each
        for each in find(Analysis(_facts({"it": ["it"]}, {"it": {"": "batch"}, "dl": {}}, is_midway=True)))
        if each.kind == "workers"
    )
    (held,) = (each for each in find(Analysis(_facts({"it": ["it"]}, is_midway=True))) if each.kind == "workers")

    assert idle.sentence == (
        "dl keeps 2 idle workers (4 MiB of host memory): `%reset_gpu --workers` ends them, the next epoch starts new ones"
    )
    assert held.sentence == "it keeps 2 workers running in mid-epoch (4 MiB of host memory): `%reset_gpu --workers` ends them"
    assert alone.sentence == "it keeps 2 workers running in mid-epoch (4 MiB of host memory): `%reset_gpu it` ends them"


def test_unused_pinned_memory_goes_last_and_only_where_there_is_any() -> None:
    facts = replace(_facts({"dl": ["dl"]}), pinned=PinnedFacts(2 * MIB, 7 * MIB))

    plan = _plan(facts)

    assert [action.kind for action in plan.actions] == ["workers", "collect", "pinned"]
    assert plan.actions[-1].host == 5 * MIB
    assert "pinned" not in [action.kind for action in _plan(replace(facts, pinned=None)).actions]


def test_memory_that_the_system_does_not_tell_is_not_zero() -> None:
    facts = _facts({"dl": ["dl"]}, private=None)

    assert facts.workers[0].host is None
    assert "of host memory" not in _plan(replace(facts, unavailable=(Unavailable("x", "y"),))).actions[0].detail
