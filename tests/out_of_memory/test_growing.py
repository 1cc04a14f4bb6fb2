"""A container that a loop fills is named as what grows; what a fit or its graphs keep never is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.out_of_memory.failed_request import FailedRequest, batch_that_fits
from nbguard.memory.out_of_memory.release_candidates import growing_container
from nbguard.memory.out_of_memory.rerun import Rerun
from nbguard.memory.scan.oom.names import filled_in_loops
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment

MiB = 1024**2
_THREE = {"t0": 512 * MiB, "t1": 512 * MiB, "t2": 512 * MiB}


def _facts(graph: Graph, *fills: str, **more: object) -> Facts:
    blocks = [make_segment((one.nbytes, "active_allocated"), address=one.address) for one in graph.storages]
    facts = make_facts(graph, device=make_cuda_device(blocks, 4096 * MiB, 0))
    oom = OomFact(device="cuda:0", requested=600 * MiB, uses=("learn", "hist"), runs_model=True, fills=fills, **more)  # type: ignore[arg-type]
    return Facts(tracked=facts.tracked, devices=facts.devices, graph=graph, oom=oom)


def _name(facts: Facts) -> str | None:
    assert facts.oom is not None
    growing = growing_container(Rerun.of(FailedRequest.of(Analysis(facts), facts.oom)))
    return None if growing is None else growing.name


def _list_in(
    root: str, steps: dict[str, dict[str, str]], kinds: dict[str, str], of: str = "list", element: str = "Tensor"
) -> Graph:
    """Return a graph in which `root` leads by `steps` to the container `c`, of three tensors."""
    tensors = dict.fromkeys(_THREE, "tensor")
    return make_graph(
        {root: [next(iter(steps), "c")]},
        steps | {"c": {f"[{at}]": name for at, name in enumerate(_THREE)}},
        _THREE,
        tensors | kinds,
        "cuda:0",
        {"c": of} | dict.fromkeys(_THREE, element),
    )


@pytest.mark.parametrize("of", ["list", "dict", "deque", "defaultdict"])
def test_the_container_that_a_loop_fills(of: str) -> None:
    hist = _list_in("hist", {}, {}, of)
    preds = _list_in("last error", {"f": {" → evaluate": "g"}, "g": {" → preds": "c"}}, {"f": "traceback", "g": "frame"}, of)

    assert _name(_facts(hist, "hist")) == "hist"
    assert _name(_facts(preds, "preds")) == "last error → evaluate → preds"


def test_the_container_of_a_librarys_own_loop_needs_no_loop_of_the_users() -> None:
    """Bug case 30: `trainer.evaluate()` joins all logits to one tensor on the GPU, and fails outside of the model."""
    graph = make_graph(
        {"last error": ["f"]},
        {"f": {" → evaluation_loop": "g"}, "g": {" → losses": "l", " → all_preds": "c"}, "c": {".tensors": "t"}},
        {"t": 900 * MiB, "l": MiB},
        {"f": "traceback", "g": "frame", "t": "tensor", "l": "tensor"},
        "cuda:0",
        {"c": "EvalLoopContainer", "t": "Tensor", "l": "Tensor"},
    )
    facts = replace(_facts(graph), oom=replace(_facts(graph).oom, runs_model=False))

    card = build_card(Analysis(facts))

    assert isinstance(card, OomCard)
    (fix,) = [fix for fix in card.fixes if fix.is_of_smaller_run]
    assert "last error → evaluation_loop → all_preds" in fix.words
    assert "900 MiB" in fix.words
    assert "eval_accumulation_steps" in fix.words


def test_a_list_that_no_loop_fills_is_none() -> None:
    """A batch of ids, mask and labels is a list of three tensors, too."""
    assert _name(_facts(_list_in("hist", {}, {}))) is None
    assert _name(_facts(_list_in("hist", {}, {}), "losses")) is None


def test_what_the_graphs_and_the_learner_of_a_fit_keep_is_none() -> None:
    """Seen: of a fit that failed in backward, a list behind the graph of its loss was called "learn grows"."""
    kinds = {"l": "learner", "p": "tensor", "g": "graph"}
    behind = _list_in("learn", {"l": {".pred": "p"}, "p": {" → graph": "g"}, "g": {"": "c"}}, kinds)
    of_the_fit = {"l": {".opt": "o"}, "o": {".param_lists": "c"}}
    parameters = _list_in("learn", of_the_fit, {"l": "learner", "o": "optimizer"}, element="Parameter")

    assert _name(_facts(behind, "learn", "hist")) is None
    assert _name(_facts(parameters, "param_lists")) is None


def test_a_fit_that_ran_out_in_backward_is_told_the_batch_that_fits() -> None:
    kinds = {"l": "learner", "p": "tensor", "g": "graph"}
    graph = _list_in("learn", {"l": {".pred": "p"}, "p": {" → graph": "g"}, "g": {"": "c"}}, kinds)
    facts = _facts(graph, learner=graph.nodes[graph.roots[0].nodes[0]].ref, batch_size=256)
    analysis = Analysis(facts)
    analysis.know(batch_that_fits, 64)

    card = build_card(analysis)

    assert isinstance(card, OomCard)
    assert [fix.words for fix in card.fixes if fix.is_of_smaller_run] == ["a batch of 64 instead of 256 fits (predicted)"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("outs.append(x)", {"outs"}),
        ("self.outs.extend([x])", {"outs"}),
        ("runs['a']['b'].add(x)", {"runs"}),
        ("runs[x] = net(x)", {"runs"}),
        ("outs += [net(x)]", {"outs"}),
        ("y = net(outs[0])", set()),
        ("f().append(x)", set()),
    ],
)
def test_names_that_a_loop_fills(line: str, names: set[str]) -> None:
    assert filled_in_loops(f"for x in data:\n    {line}\n    net(x)\nother.append(1)", 3) == names
    assert filled_in_loops(f"for x in data:\n    {line}\nnet(x)", 3) == set()
    assert filled_in_loops("for x in", 1) == set()
