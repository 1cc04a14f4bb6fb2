"""Holders against a brute-force account of random graphs: who gives back what if it alone goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.memory.core.facts import Graph, Node, Root, StorageFact, Target
from nbguard.memory.core.references import releases
from nbguard.memory.core.references.graph import (
    GRAPH,
    STALE_KINDS,
    nbytes_of,
    path_text,
    reach_of_roots,
    shortest_path,
    storages_of,
)
from nbguard.memory.core.references.holders import holders
from nbguard.memory.core.references.partners import partners_of
from nbguard.testing import make_graph

_KINDS = ("name", "module", "frame", "library", "out", "error", "garbage")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph: cycles, sharing, nodes that nothing reaches, roots of one object, storages of one node."""
    count = draw(st.integers(1, 12))
    storages = draw(st.integers(0, 6))
    some = st.lists(st.integers(0, count - 1), max_size=4, unique=True)
    entries = st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True)
    nodes = []
    for number in range(count):
        children = tuple(draw(some))
        held = tuple(draw(st.lists(st.integers(0, storages - 1), max_size=2, unique=True))) if storages else ()
        nodes.append(
            Node(
                kind="object",
                type_name="object",
                ref=number,
                children=children,
                labels=tuple(f".c{c}" for c in children),
                storages=held,
            )
        )
    roots = tuple(
        Root(kind=draw(st.sampled_from(_KINDS)), label=f"r{number}", nodes=tuple(draw(entries)))
        for number in range(draw(st.integers(1, 6)))
    )
    return Graph(roots, tuple(nodes), tuple(StorageFact("cpu", 1 << number) for number in range(storages)))


def _alive(graph: Graph, roots: set[int]) -> set[int]:
    return storages_of(graph, reach_of_roots(graph, roots))


@given(graphs())
def test_retained_bytes_re_add_to_all_that_is_reached(graph: Graph) -> None:
    everything = nbytes_of(graph, _alive(graph, set(range(len(graph.roots)))))

    assert sum(holder.retained for holder in holders(graph)) == everything


@given(graphs())
def test_a_holder_retains_what_goes_when_it_alone_goes(graph: Graph) -> None:
    """Against roots of the user's own for a name, against all for a stale one: powers of two make each set distinct."""
    every = set(range(len(graph.roots)))
    users = {n for n in every if graph.roots[n].kind not in STALE_KINDS}
    garbage = {n for n in every if graph.roots[n].kind == "garbage"}
    for holder in holders(graph):
        if holder.is_shared:
            continue
        mine = set(holder.roots)
        rivals = users if not holder.stale else every if holder.kind == "garbage" else every - garbage
        gone = _alive(graph, mine) - _alive(graph, rivals - mine)
        assert holder.retained == nbytes_of(graph, gone)
        assert holder.reaches == nbytes_of(graph, _alive(graph, mine))


@given(graphs())
def test_shared_bytes_go_when_all_their_holders_go_and_not_while_one_stays(graph: Graph) -> None:
    users = {n for n, root in enumerate(graph.roots) if root.kind not in STALE_KINDS}
    for holder in holders(graph):
        if holder.is_shared and not holder.stale:
            together = set(holder.roots)
            for stays in together:
                assert nbytes_of(graph, _alive(graph, {stays})) >= holder.retained
            assert nbytes_of(graph, _alive(graph, together) - _alive(graph, users - together)) >= holder.retained


def test_names_of_one_object_are_one_holder() -> None:
    graph = make_graph({"learn": ["a"], "best": ["a"], "other": ["b"]}, storages={"a": 10, "b": 5})

    assert [(holder.label, holder.retained) for holder in holders(graph)] == [("learn = best", 10), ("other", 5)]


def test_a_displayed_result_holds_only_what_nothing_else_needs() -> None:
    graph = make_graph({"learn": ["l"], "Out[3]": ["t"]}, {"t": {"[0]": "l"}}, {"l": 10, "t": 4})

    assert [(holder.label, holder.retained, holder.stale) for holder in holders(graph)] == [
        ("learn", 10, False),
        ("Out[3]", 4, True),
    ]


def test_cycles_that_wait_for_the_collector_share_nothing() -> None:
    """Whatever releases `Out[4]` collects them, too: the model comes back with it."""
    graph = make_graph({"Out[4]": ["m", "t"], "unreachable cycles": ["l"]}, {"l": {".model": "m"}}, {"m": 7, "t": 1, "l": 2})

    assert [(holder.label, holder.retained) for holder in holders(graph)] == [("Out[4]", 8), ("unreachable cycles", 2)]


def test_the_way_through_a_long_graph_is_not_written_again_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    length, written = 2000, 0
    steps = {f"{n}": {GRAPH: f"{n + 1}"} for n in range(length)}
    graph = make_graph({"x": ["0"], "y": [f"{length}"]}, steps, {f"{length}": 8})
    (target,) = graph.roots[1].nodes
    path_text_of = releases.path_text

    def count(graph: Graph, root: Root, way: tuple[int, ...]) -> str:
        nonlocal written
        written += len(way)
        return path_text_of(graph, root, way)

    monkeypatch.setattr(releases, "path_text", count)
    found = partners_of(graph, Target(text="y", root="y"), [target], set(), frozenset())

    assert [partner.path for partner in found.all] == ["x"]
    assert written <= 4 * length


def test_the_shortest_path_prefers_attributes_to_keys_of_a_dict() -> None:
    graph = make_graph(
        {"learn": ["l"]},
        {"l": {" → key <Parameter>": "w", ".model": "m"}, "m": {".head": "h"}, "h": {".weight": "w"}},
        {"w": 8},
    )
    goal = {node for node, fact in enumerate(graph.nodes) if fact.storages}

    path = shortest_path(graph, graph.roots[0], goal)

    assert len(path) == 4


def test_the_shortest_path_is_the_one_with_the_fewest_written_steps() -> None:
    """Attribute dicts and `_modules` stand between objects, but nobody writes them."""
    edges = {
        "l": {"": "dict"},
        "dict": {".model": "m", ".opt": "o"},
        "m": {"": "mods"},
        "mods": {".w": "w"},
        "o": {"[0]": "p"},
        "p": {"[1]": "w"},
    }
    graph = make_graph({"learn": ["l"]}, edges, {"w": 8})
    goal = {node for node, fact in enumerate(graph.nodes) if fact.storages}

    path = shortest_path(graph, graph.roots[0], goal)

    assert path_text(graph, graph.roots[0], path) == "learn.model.w"


def test_an_attribute_of_a_root_in_words_is_a_step_in_words() -> None:
    edges = {"l": {".obj": "b"}, "b": {".model": "m"}, "m": {".weight": "w"}}
    for label, text in (("last error", "last error → obj.model.weight"), ("learn", "learn.obj.model.weight")):
        graph = make_graph({label: ["l"]}, edges, {"w": 8})
        goal = {node for node, fact in enumerate(graph.nodes) if fact.storages}

        assert path_text(graph, graph.roots[0], shortest_path(graph, graph.roots[0], goal)) == text


def test_only_bytes_of_one_device_are_counted_for_it() -> None:
    graph = make_graph({"a": ["x"]}, storages={"x": 7}, device="cuda:1")

    assert holders(graph, "cuda:0") == ()
    assert [holder.retained for holder in holders(graph, "cuda:1")] == [7]
