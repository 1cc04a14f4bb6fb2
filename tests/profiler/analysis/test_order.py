"""The order of findings: right results come before memory, and memory before speed."""

from __future__ import annotations

import ast
from itertools import permutations
from pathlib import Path

import pytest

import nbguard.training.profiler
from nbguard.training.profiler.analysis.observations import first_steps
from nbguard.training.profiler.analysis.report import SEVERITIES, FitFinding, LoaderVerdict, Severity, gravest_first
from nbguard.units import MiB
from tests.profiler.analysis.timings import MS, timing

WRONG = (
    "failure",
    "not trained",
    "loss input",
    "nan",
    "data",
    "divergence",
    "eps",
    "zero_grad",
    "step",
    "renewed",
    "eval",
    "amp",
    "range",
    "rank",
)
"""Kinds of findings on results that are wrong."""


def found(kind: str, severity: Severity = "problem", time: int | None = None) -> FitFinding:
    return FitFinding(kind=kind, severity=severity, what=kind, evidence="", change="", time=time)


def calls_in_the_source() -> list[tuple[str, ast.Call]]:
    """Return the calls that make findings, by the function that is called."""
    folder = Path(nbguard.training.profiler.analysis.__file__).parents[1]
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(call.func.id, call) for call in calls if isinstance(call.func, ast.Name)]
    return [(name, call) for name, call in named if name in ("FitFinding", "_finding")]


def texts_in(*nodes: ast.AST) -> set[str]:
    constants = [node.value for tree in nodes for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def kinds_in_the_source() -> set[str]:
    calls = calls_in_the_source()
    kinds = [word.value for name, call in calls if name == "FitFinding" for word in call.keywords if word.arg == "kind"]
    kinds += [call.args[0] for name, call in calls if name == "_finding" and call.args]
    return {*texts_in(*kinds), "not trained"} - set(SEVERITIES)


def test_no_finding_advises_nothing() -> None:
    said = texts_in(*(call for _, call in calls_in_the_source()))

    assert len(said) > 100
    assert not [text for text in said if text.startswith("nothing")]


def test_each_kind_of_finding_is_known_by_what_suffers_from_it() -> None:
    kinds = kinds_in_the_source()

    assert {"straggler", "transform", "validation", "sync", "nan"} <= kinds
    assert {kind for kind in kinds if found(kind).concern == "result"} == {*WRONG, "unused"}
    assert {kind for kind in kinds if found(kind).concern == "memory"} == {
        "graph",
        "growth",
        "loop names",
        "no_grad",
        "rank memory",
        "retain_graph",
        "temporaries",
        "unfrozen",
        "worker memory",
    }


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_comes_before_memory_and_time(wrong: str) -> None:
    for kind in kinds_in_the_source():
        if found(kind).concern == "time":
            for order in permutations((found(kind, time=10**9), found(wrong), found("graph"))):
                assert [each.kind for each in gravest_first(order)] == [wrong, "graph", kind]


def test_first_steps_go_by_the_same_order() -> None:
    loader = LoaderVerdict(bound="data", sentence="data-bound", gain=90 * MS)
    slow = found("straggler", "advice", time=90 * MS)
    leak = FitFinding(kind="graph", severity="problem", what="graph", evidence="", change="", nbytes=100 * MiB)
    told = first_steps(timing(forward=100), loader, (slow, leak, found("rank")))

    assert [sentence.partition(":")[0] for sentence in told] == ["rank", "graph", "straggler"]
