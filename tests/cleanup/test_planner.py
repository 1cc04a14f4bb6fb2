"""Plans: what goes, what stays, and the bytes promised, on graphs small enough to see through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.facts import Facts, LearnerFact, Target
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment, ref_of


def _plan(facts: Facts, *targets: Target, **request: object) -> Plan:
    return plan_cleanup(facts, Request(targets=targets, **request))  # type: ignore[arg-type]


def _steps(plan: Plan) -> list[tuple[str, int | None]]:
    return [(action.kind, action.nbytes) for action in plan.actions if action.nbytes != 0]


def test_nothing_stale_nothing_promised() -> None:
    facts = make_facts(make_graph({"learn": ["l"]}, storages={"l": 9}, kinds={"l": "learner"}))

    assert _steps(_plan(facts)) == []
    assert _plan(facts).promised == 0


def test_a_displayed_learner_goes_and_a_displayed_tensor_stays() -> None:
    graph = make_graph({"Out[1]": ["l"], "Out[2]": ["t"]}, storages={"l": 9, "t": 4}, kinds={"l": "learner", "t": "tensor"})

    plan = _plan(make_facts(graph))

    assert _steps(plan) == [("out", 9)]
    assert plan.promised == 9


def test_a_displayed_result_with_data_of_its_own_stays() -> None:
    graph = make_graph(
        {"Out[1]": ["d"]}, {"d": {"['m']": "m", "['preds']": "t"}}, {"m": 9, "t": 4}, {"m": "model", "t": "tensor"}
    )

    assert _plan(make_facts(graph)).promised == 0


def test_data_that_is_part_of_the_experiment_is_no_reason_to_keep_it() -> None:
    graph = make_graph(
        {"Out[1]": ["rec"]},
        {"rec": {".learn": "l", ".losses": "t"}, "l": {".recorder": "rec"}},
        {"l": 9, "t": 4},
        {"l": "learner", "t": "tensor"},
    )

    assert _plan(make_facts(graph)).promised == 13


@pytest.mark.parametrize(
    ("table", "owner", "freed"),
    [(10, "scheduler", 9010), (91, "scheduler", 0), (10, "pipe", 0)],  # few bytes in a part; too many; the object's own
)
def test_small_tensors_in_the_parts_of_a_displayed_pipeline_are_part_of_it(table: int, owner: str, freed: int) -> None:
    edges = {
        "pipe": {"": "attributes"},
        "attributes": {".unet": "unet", ".scheduler": "scheduler", **({".betas": "t"} if owner == "pipe" else {})},
        "scheduler": {".betas": "t"} if owner == "scheduler" else {},
    }
    kinds = {"unet": "model", "t": "tensor"}
    graph = make_graph({"Out[1]": ["pipe"]}, edges, {"unet": 9000, "t": table}, kinds, types={"attributes": "dict"})

    assert _plan(make_facts(graph)).promised == freed


def test_what_a_name_needs_is_not_promised() -> None:
    graph = make_graph(
        {"dls": ["d"], "Out[1]": ["l"]}, {"l": {".dls": "d"}}, {"l": 9, "d": 50}, {"l": "learner", "d": "loader"}
    )

    assert _plan(make_facts(graph)).promised == 9


def test_variables_of_the_last_error_go_but_not_those_a_name_needs() -> None:
    graph = make_graph(
        {"learn": ["l"], "last error": ["e"]},
        {"e": {"": "tb"}, "tb": {" → fit": "f"}, "f": {" → self": "l", " → xb": "x", " → n": "n"}},
        {"l": 9, "x": 30},
        {"l": "learner", "e": "traceback", "tb": "traceback", "f": "frame", "x": "tensor", "n": "data"},
    )

    plan = _plan(make_facts(graph))

    assert plan.promised == 30
    assert [action.names for action in plan.actions if action.kind == "error"] == [(" → xb",)]


def test_a_variable_shared_with_a_closure_goes_through_its_cell_unless_the_closure_lives() -> None:
    edges = {"e": {" → f": "f"}, "f": {" → big": "c"}, "c": {"": "x"}, "fn": {" → closure big": "c"}}
    kinds = {"e": "traceback", "f": "frame", "c": "cell", "x": "tensor", "fn": "code"}
    dead = make_graph({"last error": ["e"]}, edges, {"x": 30}, kinds)
    alive = make_graph({"last error": ["e"], "use": ["fn"]}, edges, {"x": 30}, kinds)

    assert _plan(make_facts(dead)).promised == 30
    assert _plan(make_facts(alive)).promised == 0


def test_an_error_kept_by_the_user_is_left_alone() -> None:
    edges = {"e": {" → f": "f"}, "f": {" → xb": "x"}}
    graph = make_graph({"err": ["e"], "last error": ["e"]}, edges, {"x": 30}, {"e": "traceback", "f": "frame", "x": "tensor"})

    assert _plan(make_facts(graph)).promised == 0


@pytest.mark.parametrize(("thread", "promised"), [("MainThread", 30), ("trainer", 0)])
def test_a_plan_for_later_promises_what_the_cells_functions_still_keep(thread: str, promised: int) -> None:
    graph = make_graph({"x": ["x"], "running f()": ["x", "y"]}, storages={"x": 30, "y": 7})
    graph = replace(graph, roots=tuple(replace(root, thread=thread) for root in graph.roots))
    request = Request(targets=(Target(text="x", root="x"),))

    now = plan_cleanup(make_facts(graph), request)
    later = plan_cleanup(make_facts(graph), request, is_for_later=True)

    assert now.promised == 0
    assert (later.promised, [each.text for each in later.request.targets], bool(later.kept)) == (promised, ["x"], not promised)


@pytest.mark.parametrize(("running", "promised"), [(False, 20), (True, 0)])
def test_leftovers_of_a_batch_go_when_no_fit_runs(running: bool, promised: int) -> None:
    graph = make_graph(
        {"learn": ["l"]}, {"l": {".xb": "x", ".model": "m"}}, {"x": 20, "m": 9}, {"l": "learner", "m": "model", "x": "tensor"}
    )
    facts = make_facts(graph, [LearnerFact(0, running, ("Learner",), ("xb",))])

    assert _plan(facts).promised == promised


def test_garbage_is_collected() -> None:
    assert _steps(_plan(make_facts(make_graph({"unreachable cycles": ["l"]}, storages={"l": 9})))) == [("collect", 9)]


def test_targets_go_and_nothing_else_that_is_stale() -> None:
    graph = make_graph(
        {"learn": ["a"], "Out[1]": ["b"], "Out[2]": ["a"]}, storages={"a": 9, "b": 5}, kinds={"a": "learner", "b": "learner"}
    )

    plan = _plan(make_facts(graph), Target(text="learn", root="learn"))

    assert plan.promised == 9
    assert [action.label for action in plan.actions if action.kind in ("del", "out")] == ["learn deleted", "Out[2]:  forgotten"]


def test_another_name_of_a_target_keeps_it() -> None:
    graph = make_graph({"learn": ["a"], "best": ["a"]}, storages={"a": 9}, kinds={"a": "learner"})

    assert _plan(make_facts(graph), Target(text="learn", root="learn")).promised == 0


def test_a_part_of_a_container_goes_alone() -> None:
    graph = make_graph(
        {"runs": ["d"]}, {"d": {"['a']": "x", "['b']": "y"}}, {"x": 9, "y": 5}, {"d": "object", "x": "model", "y": "learner"}
    )
    target = Target(text="runs['a']", containers=(graph.nodes[0].ref,), value=ref_of(graph, "model"))

    assert _plan(make_facts(graph), target).promised == 9


def test_a_computed_target_is_done_but_not_promised() -> None:
    plan = _plan(make_facts(make_graph({"runs": ["d"]}, storages={"d": 9})), Target(text="runs[key()]"))

    assert (plan.actions[0].kind, plan.actions[0].nbytes) == ("del", None)
    assert plan.promised == 0


def test_a_target_without_memory_is_skipped_with_a_word() -> None:
    plan = _plan(make_facts(make_graph({"a": ["x"]}, storages={"x": 3})), Target(text="n", root="n", value_kind="int"))

    assert plan.skipped == ("n (int) leads to no tensor, model or loader on cpu: left as it is",)
    assert [action.kind for action in plan.actions] == ["collect"]


def test_everything_goes_but_functions_and_what_is_kept() -> None:
    graph = make_graph({"a": ["x"], "keep": ["y"], "f": ["z"]}, storages={"x": 1, "y": 2, "z": 4}, kinds={"z": "code"})

    assert _plan(make_facts(graph), everything=True, keep=("keep",)).promised == 1


@pytest.mark.parametrize(
    ("kind", "nbytes", "goes"), [("model", 0, False), ("model", 2, True), ("pool", 0, True), ("iterator", 0, True)]
)
def test_of_everything_a_name_stays_that_frees_nothing(kind: str, nbytes: int, goes: bool) -> None:
    storages = {"x": 1} | ({"l": nbytes} if nbytes else {})
    graph = make_graph({"a": ["x"], "brought": ["t"]}, {"t": {".loss_func": "l"}}, storages, {"l": kind})

    plan = _plan(make_facts(graph), everything=True)

    assert [action.subject for action in plan.actions if action.kind == "del"] == ["a", "brought"][: 1 + goes]


def test_of_everything_a_name_stays_whose_memory_something_else_keeps() -> None:
    """As an object that a library's module has, too, and another name of what is kept."""
    graph = make_graph(
        {"a": ["x"], "b": ["x", "y"], "brought": ["t"], "library": ["t"], "keep": ["k"], "alias": ["k"]},
        storages={"x": 1, "y": 2, "t": 4, "k": 8},
    )
    roots = tuple(replace(root, kind="library") if root.label == "library" else root for root in graph.roots)
    facts = make_facts(replace(graph, roots=roots))

    plan = _plan(facts, everything=True, keep=("keep",))

    assert [action.subject for action in plan.actions if action.kind == "del"] == ["a", "b"]
    assert plan.promised == 3


def test_a_displayed_result_can_be_kept() -> None:
    graph = make_graph({"Out[1]": ["l"]}, storages={"l": 9}, kinds={"l": "learner"})

    assert _plan(make_facts(graph), keep=("Out[1]",)).promised == 0


def test_bytes_of_steps_re_add_to_the_promise_when_they_overlap() -> None:
    """Displayed and in the last error: each byte is promised once, by the step after which it is gone."""
    graph = make_graph(
        {"Out[1]": ["l"], "last error": ["e"]},
        {"e": {" → f": "f"}, "f": {" → self": "l", " → x": "x"}},
        {"l": 9, "x": 4},
        {"l": "learner", "e": "traceback", "f": "frame", "x": "tensor"},
    )
    plan = _plan(make_facts(graph))

    assert sum(action.nbytes or 0 for action in plan.actions) == plan.promised == 13


def test_bytes_back_to_the_device_are_whole_segments() -> None:
    graph = make_graph({"Out[1]": ["l"]}, storages={"l": 60}, kinds={"l": "learner"}, device="cuda:0")
    address = graph.storages[0].address
    alone = make_segment((60, "active_allocated"), (40, "inactive"), address=address)
    shared = make_segment((60, "active_allocated"), (40, "active_allocated"), address=address)

    assert _plan(make_facts(graph, device=make_cuda_device([alone], 1000, 900))).reserved == 100
    assert _plan(make_facts(graph, device=make_cuda_device([shared], 1000, 900))).reserved == 0


def _after_a_failed_fit() -> Facts:
    """A Learner whose fit has failed, another with leftovers of an earlier one, a displayed Learner, a loose cycle."""
    graph = make_graph(
        {"learn": ["l"], "other": ["o"], "Out[3]": ["shown"], "last error": ["e"], "unreachable cycles": ["c"]},
        {
            "l": {".model": "m", ".pred": "p"},
            "o": {".pred": "q"},
            "e": {" → fit": "f"},
            "f": {" → self": "l", " → batch": "x", " → shown": "shown"},
        },
        {"m": 100, "p": 20, "q": 3000, "x": 40_000, "shown": 500_000, "c": 6_000_000},
        {"l": "learner", "o": "learner", "shown": "learner", "e": "traceback", "f": "frame", "x": "tensor", "c": "learner"},
    )
    nodes = [n for n, node in enumerate(graph.nodes) if node.kind == "learner"][:2]
    learners = [LearnerFact(node, is_running=False, names=("Learner",), leftovers=("pred",)) for node in nodes]
    return make_facts(graph, learners)


def test_after_a_failed_cell_only_what_its_error_holds_and_left_on_its_learner_goes() -> None:
    plan = plan_cleanup(_after_a_failed_fit(), Request(only_error=True))

    assert [(action.kind, action.nbytes) for action in plan.actions] == [
        ("leftovers", 20),
        ("error", 40_000),
        ("collect", 6_000_000),
    ]
    (error,) = [action for action in plan.actions if action.kind == "error"]
    assert error.names == (" → batch",)


def test_a_full_cleanup_of_the_same_takes_the_rest_too() -> None:
    plan = plan_cleanup(_after_a_failed_fit(), Request())

    assert plan.promised == 20 + 3000 + 40_000 + 500_000 + 6_000_000


def test_a_displayed_result_that_leads_to_a_target_only_by_the_reference_that_goes_stays() -> None:
    """`runs` is displayed with something else: after `del runs['a']` it no longer leads to what is to go."""
    graph = make_graph(
        {"runs": ["d"], "Out[1]": ["t"]},
        {"d": {"['a']": "x"}, "t": {"[0]": "d", "[1]": "y"}},
        {"x": 9, "y": 5},
        {"x": "model", "y": "learner"},
    )
    target = Target(text="runs['a']", containers=(graph.nodes[0].ref,), value=ref_of(graph, "model"))

    plan = _plan(make_facts(graph), target)

    assert [action.kind for action in plan.actions] == ["del", "collect"]
    assert plan.promised == 9


def test_a_displayed_container_of_a_target_does_not_keep_it_in_the_last_error() -> None:
    graph = make_graph(
        {"runs": ["d"], "Out[1]": ["d"], "last error": ["e"]},
        {"d": {"['a']": "x"}, "e": {" → f": "f"}, "f": {" → run": "x"}},
        {"x": 9},
        {"x": "model", "e": "traceback", "f": "frame"},
    )
    target = Target(text="runs['a']", containers=(graph.nodes[0].ref,), value=ref_of(graph, "model"))

    assert _plan(make_facts(graph), target).promised == 9


def test_leftovers_of_a_fit_that_ended_well_go_if_they_hold_something_of_their_own() -> None:
    """The bars' loader replaced since: bytes come back. Still in use, by the Learner or by another's bars: none would."""
    edges = {
        "l": {".dls": "d", ".progress": "p"},
        "p": {".pbar": "old"},
        "m": {".dls": "d", ".progress": "q"},
        "q": {".pbar": "d"},
    }
    kinds = {"l": "learner", "m": "learner", "d": "loader", "old": "loader"}
    graph = make_graph({"learn": ["l"], "other": ["m"]}, edges, {"d": 5000, "old": 4000}, kinds)
    learners = [LearnerFact(n, False, (name,), ("progress.pbar",)) for n, name in ((0, "one"), (1, "two"))]

    plan = _plan(make_facts(graph, learners))

    assert [(action.kind, action.nbytes) for action in plan.actions] == [("leftovers", 4000), ("collect", 0)]


def test_leftovers_that_two_learners_share_go_with_both() -> None:
    """A batch that two interrupted fits hold comes back by the second of them."""
    edges = {"l": {".xb": "x"}, "m": {".xb": "x"}}
    graph = make_graph({"learn": ["l"], "other": ["m"]}, edges, {"x": 5000}, {"l": "learner", "m": "learner", "x": "tensor"})
    learners = [LearnerFact(n, False, (name,), ("xb",)) for n, name in ((0, "one"), (1, "two"))]

    assert _steps(_plan(make_facts(graph, learners))) == [("leftovers", 5000)]
    assert _plan(make_facts(graph, learners)).promised == 5000


def test_what_leads_to_objects_that_were_not_looked_into_promises_at_least_its_bytes() -> None:
    graph = make_graph(
        {"many": ["m"], "few": ["f"]},
        {"m": {"[0]": "t", "[1]": "rest"}, "f": {"[0]": "u"}},
        {"t": 9, "u": 4, "rest": 0},
        {"rest": "graph"},
    )
    facts = make_facts(replace(graph, rest=next(n for n, node in enumerate(graph.nodes) if node.ref == ref_of(graph, "graph"))))
    many, few = (Target(text=name, root=name) for name in ("many", "few"))

    assert (_plan(facts, many).promised, _plan(facts, many).at_least) == (9, True)
    assert (_plan(facts, few).promised, _plan(facts, few).at_least) == (4, False)
    assert "would free at least 9 B" in str(_plan(facts, many))
    assert "nothing counts" in str(_plan(facts, many)), "no allocator counts the memory of a CPU"
    assert "at least" not in str(_plan(facts, few))


@pytest.mark.parametrize(("target", "at_most"), [("hidden", 32 + 300), ("x", None)])
def test_what_leads_to_memory_that_was_not_looked_into_is_promised_as_an_interval(target: str, at_most: int | None) -> None:
    graph = make_graph(
        {"hidden": ["h"], "x": ["t"]},
        {"h": {" → graph": "g"}, "g": {" → …": "rest"}},
        {"h": 32, "t": 8},
        {"h": "tensor", "g": "graph", "rest": "graph", "t": "tensor"},
        device="cuda:0",
    )
    graph = replace(graph, rest=next(n for n, node in enumerate(graph.nodes) if node.kind == "graph" and not node.children))
    address = graph.storages[0].address
    blocks = [(32, "active_allocated"), (8, "active_allocated"), (300, "active_allocated")]
    device = make_cuda_device([make_segment(*blocks, address=address)], 1000, 600)

    plan = _plan(make_facts(graph, device=device), Target(text=target, root=target))

    assert (plan.at_least, plan.at_most) == (at_most is not None, at_most)
    assert plan.promised == (32 if target == "hidden" else 8)
    assert ("at least" in str(plan), "up to" in str(plan)) == (plan.at_least, plan.at_least)
