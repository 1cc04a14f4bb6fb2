"""Paths as a report shows them, read back: which ways they stand for, and what a cleanup takes away for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.errors import TargetError
from nbguard.memory.core.facts import Graph
from nbguard.memory.core.references.graph import path_text, shortest_paths
from nbguard.memory.core.references.shown_paths import targets_written, ways_written
from nbguard.testing import make_graph

_EDGES = {
    "registry": {"[<finalize>]": "info"},
    "info": {".func": "method"},
    "method": {".__self__": "obj"},
    "obj": {"": "space"},
    "space": {".b": "list"},
    "list": {"[0]": "t", "[1]": "u"},
    "model": {".hooks": "hooks"},
    "hooks": {"[3]": "function"},
    "function": {"": "cells"},
    "cells": {" → closure old": "cell"},
    "cell": {"": "old"},
    "error": {" → fit": "frame"},
    "frame": {" → xb": "t"},
}
_TYPES = {
    "registry": "dict",
    "info": "_Info",
    "method": "method",
    "space": "dict",
    "list": "list",
    "hooks": "OrderedDict",
    "function": "function",
    "cells": "tuple",
}
_KINDS = {"model": "model", "old": "model", "frame": "frame", "error": "traceback", "cell": "cell", "function": "code"}


@pytest.fixture
def graph() -> Graph:
    """A finalizer of its own object, a hook whose closure has an old model, and the last error."""
    roots = {"lib.finalize": ["registry"], "model": ["model"], "last error": ["error"], "running f()": ["old"]}
    graph = make_graph(roots, _EDGES, {"t": 4, "u": 8, "old": 16}, _KINDS, types=_TYPES)
    library = replace(graph.roots[0], kind="library", module="lib")
    return replace(graph, roots=(library, *graph.roots[1:]))


def test_every_path_that_can_be_written_is_read_back(graph: Graph) -> None:
    for root in graph.roots:
        for node, way in shortest_paths(graph, root, range(len(graph.nodes))).items():
            for shorten in (0, 3):
                text = path_text(graph, root, way, shorten)
                ends = {found[-1] for _, found in ways_written(graph, text)}
                assert node in ends or any(_is_unwritten(graph, end, node) for end in ends), text


def _is_unwritten(graph: Graph, parent: int, child: int) -> bool:
    """Say whether only steps without a label lead from one node to another: both are written alike."""
    steps = [node for node, label in graph.nodes[parent].references if not label]
    return child in steps or any(_is_unwritten(graph, step, child) for step in steps)


def test_a_text_that_no_report_shows_stands_for_nothing(graph: Graph) -> None:
    for text in ("lib.finaliz", "lib.finalize[0]", "model.hooks[33]", "model.hooks[3", "xb"):
        assert ways_written(graph, text) == ()
        assert targets_written(graph, text) == ()


@pytest.mark.parametrize(
    ("text", "parent", "child"),
    [
        ("lib.finalize[<finalize>].func.__self__.b[0]", "list", "t"),
        ("lib.finalize[<finalize>].func.__self__", "registry", "info"),
        ("lib.finalize → …[1]", "list", "u"),
        ("model.hooks[3] → closure old", "hooks", "function"),
    ],
)
def test_a_path_takes_the_last_reference_away_that_can_go(graph: Graph, text: str, parent: str, child: str) -> None:
    (target,) = targets_written(graph, text)
    names = list(dict.fromkeys(["registry", "model", "error", "old", *_EDGES]))

    assert (target.containers, target.value) == ((_ref(graph, parent, names),), _ref(graph, child, names))


def _ref(graph: Graph, name: str, names: list[str]) -> int:
    everything = list(dict.fromkeys([*names, "t", "u", "old", *(child for out in _EDGES.values() for child in out.values())]))
    return graph.nodes[everything.index(name)].ref


def test_the_root_of_a_library_lets_go_of_all_that_it_keeps(graph: Graph) -> None:
    (target,) = targets_written(graph, "lib.finalize")

    assert target.step == "[<finalize>]"


def test_what_the_last_error_keeps_is_for_the_step_that_releases_it(graph: Graph) -> None:
    (target,) = targets_written(graph, "last error → fit → xb")

    assert target.lets_go
    assert not target.containers


def test_what_code_uses_is_refused(graph: Graph) -> None:
    with pytest.raises(TargetError, match="wait until it ends"):
        targets_written(graph, "running f()")
