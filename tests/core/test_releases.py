"""Lines that let memory go: what each cuts, and where there is none that is safe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core.advice import Advice
from nbguard.memory.core.facts import Graph
from nbguard.memory.core.references.graph import shortest_path
from nbguard.memory.core.references.releases import release_of_way
from nbguard.testing import make_facts, make_graph


def _advice(graph: Graph) -> Advice:
    root = graph.roots[0]
    return release_of_way(graph, root, shortest_path(graph, root, {len(graph.nodes) - 1}))


def _library(attribute: str, type_name: str) -> Graph:
    graph = make_graph(
        {"lib.Reg": ["space"]},
        {"space": {attribute: "box"}, "box": {"[0]": "net"}},
        {"net": 40},
        types={"space": "dict", "box": type_name},
    )
    root = replace(graph.roots[0], kind="library", what="class of a library", is_class=True, module="lib")
    return replace(graph, roots=(root,))


@pytest.mark.parametrize(
    ("attribute", "type_name", "command"),
    [
        (".items", "list", "import lib; lib.Reg.items.clear()"),
        (".enc", "_lru_cache_wrapper", "import lib; lib.Reg.enc.cache_clear()"),
        ("._enc", "_lru_cache_wrapper", "import lib; lib.Reg._enc.cache_clear()"),
        ("._registry", "dict", "%reset_gpu lib.Reg._registry[0]"),  # the entry alone: others need the rest
        (".queue", "Queue", "%reset_gpu lib.Reg.queue[0]"),
        (".hooks", "tuple", "%reset_gpu lib.Reg.hooks"),
    ],
)
def test_what_a_class_of_a_library_keeps(attribute: str, type_name: str, command: str) -> None:
    graph = _library(attribute, type_name)
    advice = _advice(graph)

    assert advice.command == command
    assert promised(make_facts(graph), (advice,)) == (40 if command else None)


def test_a_class_attribute_of_the_users_is_emptied_not_the_class_deleted() -> None:
    edges = {"Api": {".registry": "box"}, "box": {"[0]": "net"}}
    graph = make_graph({"Api": ["Api"]}, edges, {"net": 40}, types={"Api": "type", "box": "list"})

    assert _advice(graph).command == "Api.registry.clear()"


def test_what_a_list_has_twice_is_not_deleted_from_it() -> None:
    graph = make_graph({"rows": ["box"]}, {"box": {"[0]": "row"}}, {"row": 40}, types={"box": "list"})
    box, row = graph.nodes
    twice = replace(graph, nodes=(replace(box, repeated=(1,)), row))

    assert (_advice(graph).command, _advice(twice).command) == ("%reset_gpu rows[0]", "%reset_gpu rows")


def test_a_root_whose_label_is_no_expression_has_no_command() -> None:
    graph = make_graph({"libraries (method)": ["m"]}, {"m": {".__self__": "net"}}, {"net": 40})
    root = replace(graph.roots[0], kind="library")

    assert _advice(replace(graph, roots=(root,))).command == ""


@pytest.mark.parametrize(
    ("type_name", "label", "command"),
    [("partial", ".func", "%reset_gpu x"), ("ContextVar", " → net", "%reset_gpu x"), ("Run", ".func", "%reset_gpu x.func")],
)
def test_what_cannot_be_deleted_is_not_advised(type_name: str, label: str, command: str) -> None:
    graph = make_graph({"x": ["x"]}, {"x": {label: "net"}}, {"net": 40}, {"net": "model"}, types={"x": type_name})

    assert _advice(graph).command == command
