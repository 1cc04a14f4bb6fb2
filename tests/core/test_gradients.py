"""Gradients that idle Learners keep."""

from __future__ import annotations

from nbguard.memory.core.facts import LearnerFact
from nbguard.memory.core.references.holders import idle_gradients
from nbguard.testing import make_facts, make_graph


def _facts(*, running: bool = False, also_named: bool = False):  # type: ignore[no-untyped-def]
    graph = make_graph(
        {"learn": ["l"], "best": ["l"], "model": ["m"]} | ({"g": ["g"]} if also_named else {}),
        {"l": {".model": "m"}, "m": {".weight": "w"}, "w": {".grad": "g"}},
        {"w": 100, "g": 100},
        {"l": "learner", "m": "model", "w": "tensor", "g": "tensor"},
    )
    learner = next(number for number, node in enumerate(graph.nodes) if node.kind == "learner")
    return make_facts(graph, [LearnerFact(learner, running, "Learner")])


def test_a_learner_is_named_once_with_the_bytes_that_only_its_gradients_take() -> None:
    assert idle_gradients(_facts()) == (("learn", 100),)


def test_gradients_in_use_are_not_mentioned() -> None:
    assert idle_gradients(_facts(running=True)) == ()
    assert idle_gradients(_facts(also_named=True)) == ()
