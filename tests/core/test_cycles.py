"""Waiting cycles in words: whose they are, how many, and by which reference each leads back to itself."""

from __future__ import annotations

import pytest

from nbguard.memory.core.facts import Graph
from nbguard.memory.core.references.owner_sets import cycles_in_words
from nbguard.testing import make_graph


def _probe(number: int) -> tuple[dict[str, dict[str, str]], dict[str, str], dict[str, str]]:
    """Return references, kinds and types of a module that has a forward hook whose closure is the module."""
    own = {name: f"{name}{number}" for name in ("probe", "hooks", "hook", "cells", "cell", "body")}
    edges = {
        own["probe"]: {"._forward_hooks": own["hooks"], ".body": own["body"]},
        own["hooks"]: {"[0]": own["hook"]},
        own["hook"]: {"": own["cells"]},
        own["cells"]: {" → closure self": own["cell"]},
        own["cell"]: {"": own["probe"]},
    }
    types = {"probe": "Probe", "hooks": "OrderedDict", "hook": "function", "cells": "tuple", "body": "Sequential"}
    kinds = {"probe": "model", "body": "model", "hook": "code", "cell": "cell"}
    return edges, {own[n]: kind for n, kind in kinds.items()}, {own[n]: name for n, name in types.items()}


def _graph(count: int, **extra: dict[str, str]) -> Graph:
    edges, kinds, types, sizes = dict(extra), {"net": "model"}, {"net": "Probe"}, {"net": 8}
    for number in range(count):
        for whole, part in zip((edges, kinds, types), _probe(number), strict=True):
            whole.update(part)  # type: ignore[arg-type]
        sizes[f"body{number}"] = 8
    roots = {"net": ["net"], "unreachable cycles": [f"{name}{n}" for n in range(count) for name in ("cell", "probe")]}
    return make_graph(roots, edges, sizes, kinds, types=types)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "an earlier Probe (net), in a cycle through its own forward hook"),
        (4, "4 earlier Probe (net), each in a cycle through its own forward hook"),
    ],
)
def test_cycles_through_a_hook_are_told_by_their_owner(count: int, words: str) -> None:
    graph = _graph(count)

    assert cycles_in_words(graph, graph.roots[1]) == words


def test_any_other_cycle_is_told_by_its_way_and_its_optimizer() -> None:
    edges = {
        "runner": {".sched": "sched", ".opt": "opt"},
        "sched": {".optimizer": "opt", ".lr_lambdas": "list"},
        "list": {"[0]": "f"},
        "f": {"": "cells"},
        "cells": {" → closure self": "cell"},
        "cell": {"": "runner"},
        "opt": {".state": "t", ".step": "method"},
        "method": {".__self__": "opt"},
    }
    types = {"runner": "Runner", "sched": "LambdaLR", "list": "list", "f": "function", "cells": "tuple", "opt": "Adam"}
    kinds = {"opt": "optimizer", "f": "code", "cell": "cell"}
    graph = make_graph({"unreachable cycles": ["t", "opt", "sched", "runner"]}, edges, {"t": 8}, kinds, types=types)
    runner = next(n for n, node in enumerate(graph.nodes) if node.type_name == "Runner")

    words = cycles_in_words(graph, graph.roots[0], {runner})

    assert words == "an earlier Runner with its Adam, in a cycle: Runner.sched.lr_lambdas[0] → closure self → Runner"


def test_an_error_is_told_by_its_class_whatever_its_traceback_leads_to() -> None:
    edges = {
        "frame": {".f_locals": "result", ".big": "t"},
        "result": {".error": "error"},
        "error": {".__traceback__": "traceback"},
        "traceback": {".tb_frame": "frame"},
    }
    types = {"result": "ExecutionResult", "error": "ValueError", "traceback": "traceback", "frame": "frame"}
    kinds = {"frame": "frame", "error": "traceback", "traceback": "traceback"}
    graph = make_graph({"unreachable cycles": ["frame", "result"]}, edges, {"t": 8}, kinds, types=types)

    assert cycles_in_words(graph, graph.roots[0]) == "an earlier ValueError, in a cycle through its own traceback"


def test_frames_that_ipython_has_shown_are_told_as_such_and_a_users_class_of_that_name_by_it() -> None:
    edges, sizes = dict[str, dict[str, str]](), dict[str, int]()
    for number in range(3):
        edges |= {
            f"info{number}": {".lines": f"lines{number}", ".frame": f"frame{number}"},
            f"lines{number}": {f"[{number}]": f"line{number}"},
            f"line{number}": {".frame_info": f"info{number}"},
            f"frame{number}": {".f_locals": f"t{number}"},
        }
        sizes[f"t{number}"] = 8
    types = {
        f"{name}{n}": {"info": "FrameInfo", "lines": "list", "line": "Line"}[name]
        for n in range(3)
        for name in ("info", "lines", "line")
    }
    roots = {"unreachable cycles": list(types)}
    graph = make_graph(roots, edges, sizes, {f"frame{n}": "frame" for n in range(3)}, types=types)
    infos = {n for n, node in enumerate(graph.nodes) if node.type_name == "FrameInfo"}

    assert cycles_in_words(graph, graph.roots[0]) == "frames that IPython showed of earlier errors"
    words = cycles_in_words(graph, graph.roots[0], infos)
    assert words.startswith("an earlier FrameInfo, in a cycle: FrameInfo.lines[")
    assert words.endswith("; 1 more kind")


def test_what_is_no_cycle_is_not_named_so() -> None:
    graph = make_graph({"unreachable cycles": ["t"], "x": ["x"]}, {}, {"t": 8, "x": 8})

    assert [cycles_in_words(graph, root) for root in graph.roots] == ["", ""]
