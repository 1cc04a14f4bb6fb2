"""Plans and outcomes in the words of a sidebar, and what of a plan may be done while a cell runs."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from nbguard.frontend.sidebar.protocol.plan_views import (
    cache_view,
    emptied_view,
    outcome_view,
    plan_view,
    request_of,
    rest_of,
    unpark_view,
    unparked_view,
    waits_for_cell,
)
from nbguard.frontend.sidebar.protocol.state import ActionName, PlanView
from nbguard.memory.cleanup.plan.parking import Unparked, plan_parking
from nbguard.memory.cleanup.plan.plan import Action, Outcome, Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.facts import Facts, LearnerFact, ParkedFact, PinnedFacts, PoolFact, Target
from nbguard.memory.core.processes import Process, WorkersFact
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment
from nbguard.units import GiB, MiB
from tests.sidebar.protocol.scenes import SCENES

LEARN = (Target(text="learn", root="learn"),)


def _clean(facts: Facts, *keep: str) -> PlanView:
    return plan_view(plan_cleanup(facts, request_of("clean_stale", keep=keep)), "clean_stale", "t0")


def test_the_plan_to_clean_stale() -> None:
    view = _clean(SCENES["stale"]().facts)

    assert (view.token, view.title, view.confirm) == ("t0", "Clean stale: the plan", "Free 3.67 GiB")
    assert [(row.label, row.nbytes, row.key) for row in view.rows] == [
        ("Out[9]: Learner · ResNet · Adam will be forgotten", 614 * MiB, "Out[9]"),
        ("last error: 2 variables of 1 frame will be released", 3123 * MiB, "last error"),
        ("unreachable cycles will be collected", 20 * MiB, "unreachable cycles"),
    ]
    assert sum(row.nbytes or 0 for row in view.rows) == view.promised
    assert (view.irreversible, view.refused, view.when) == ("", "", "now")


@pytest.mark.parametrize(("key", "left"), [("Out[9]", 3143), ("last error", 634), ("unreachable cycles", 3737)])
def test_a_row_is_left_out_by_its_key(key: str, left: int) -> None:
    view = _clean(SCENES["stale"]().facts, key)

    assert view.promised == left * MiB
    assert [(row.label, row.kept, row.nbytes) for row in view.rows if row.key == key] == [(key, True, None)]
    assert len(view.rows) == 3


def test_nothing_stale_is_said_and_cannot_be_applied() -> None:
    view = _clean(SCENES["idle"]().facts)

    assert (view.token, view.rows, view.promised) == ("", (), 0)
    assert view.refused.startswith("Nothing is stale now")
    assert "(Out[9], last error)" in _clean(_without_cycle(), "Out[9]", "last error").refused


def _without_cycle() -> Facts:
    facts = SCENES["stale"]().facts
    roots = tuple(root for root in facts.graph.roots if root.kind != "garbage")
    return replace(facts, graph=replace(facts.graph, roots=roots))


def test_a_release_says_that_it_cannot_be_undone() -> None:
    facts = SCENES["idle"]().facts
    view = plan_view(plan_cleanup(facts, request_of("release", LEARN)), "release", "t", "cell_end", "because")

    assert (view.title, view.confirm) == ("Release learn: the plan", "Release learn")
    assert view.irreversible == "learn is deleted: this cannot be undone"
    assert (view.when, view.why) == ("cell_end", "because")
    assert view.promised == 4200 * MiB
    assert [row.key for row in view.rows] == ["learn"]
    view = plan_view(plan_cleanup(facts, request_of("release", LEARN, ("learn",))), "release", "t")
    assert ([(row.key, row.kept) for row in view.rows], view.token, view.promised) == ([("learn", True)], "", 0)
    two = (*LEARN, Target(text="preds", root="preds"))
    view = plan_view(plan_cleanup(facts, request_of("release", two)), "release", "t")
    assert view.irreversible == "learn, preds are deleted: this cannot be undone"


def test_a_release_of_what_holds_nothing_is_refused() -> None:
    request = request_of("release", (Target(text="x", root="x", value_kind="int"),))
    view = plan_view(plan_cleanup(SCENES["idle"]().facts, request), "release", "t")

    assert (view.token, view.irreversible) == ("", "")
    assert "x (int) leads to no tensor, model or loader" in view.refused


def test_a_parking_can_be_undone() -> None:
    plan = plan_parking(SCENES["idle"]().facts, LEARN, {})
    view = plan_view(plan, "park", "t")

    assert (view.title, view.confirm, view.irreversible) == ("Park learn: the plan", "Park learn", "")
    assert "host memory" in view.rows[0].detail
    outcome = Outcome(plan=plan, done=plan.actions, undone=(), realised=plan.promised, extra=0, before=5 * GiB, after=GiB)
    done = outcome_view(outcome, "park", ("learn",))
    assert (done.sentence, done.undo) == ("Parked 4.1 GiB of 4.1 GiB promised.", ("learn",))


def test_unparking() -> None:
    parked = (ParkedFact("learn", "cuda:0", GiB, 8), ParkedFact("old", "cuda:0", MiB, 1))

    view = unpark_view(parked, ["learn"], "t")
    assert (view.title, view.confirm, view.promised, view.token) == ("Unpark learn: the plan", "Bring learn back", GiB, "t")
    assert view.rows[0].detail == "goes back to cuda:0, bit by bit (8 tensors)"
    assert unpark_view(parked, [], "t").promised == GiB + MiB
    assert unpark_view(parked, ["learn", "gone"], "t").refused == "Nothing is parked under gone."
    assert unpark_view((), [], "t").token == ""
    done = unparked_view(
        Unparked(names=("learn",), nbytes=GiB, tensors=8, devices=("cuda:0",), left=(("learn", MiB, "no room"),))
    )
    assert done.sentence == "Brought 1 GiB back to cuda:0. 1 MiB is still parked."
    assert (done.promised, done.realised, done.undone) == (GiB + MiB, GiB, (("learn", "no room"),))


def test_the_cache_by_device() -> None:
    segments = [
        make_segment((30 * MiB, "inactive"), address=1 << 40),
        make_segment((MiB, "inactive"), address=1 << 41, pool=(0, 1)),
    ]
    device = make_cuda_device(segments, 80 * GiB, 60 * GiB)
    full = make_cuda_device([make_segment((MiB, "active_allocated"))], 80 * GiB, 60 * GiB, "cuda:1")

    kept = Facts(tracked="cuda", devices=(device, full), pools=(PoolFact(pool=(0, 1), keepers=(), is_left=True),))
    view = cache_view(kept, "t")
    assert [(row.label, row.nbytes) for row in view.rows] == [("cuda:0", 30 * MiB)]
    assert (view.promised, view.confirm, view.token, view.irreversible) == (30 * MiB, "Empty the cache", "t", "")
    assert "already empty" in cache_view(Facts(tracked="cuda", devices=(full,)), "t").refused
    cpu = cache_view(SCENES["cpu"]().facts, "t")
    assert (cpu.token, cpu.rows) == ("", ())
    assert "no GPU memory" in cpu.refused
    counted = cache_view(Facts(tracked="cuda", devices=(replace(device, segments=None),)), "t")
    assert (counted.rows[0].nbytes, counted.token) == (None, "t")
    doubtful = cache_view(Facts(tracked="cuda", devices=(device, full)), "t")
    assert [(row.label, row.nbytes) for row in doubtful.rows] == [("cuda:0", 30 * MiB), ("cuda:0", None)]
    assert (doubtful.promised, "1 MiB" in doubtful.rows[1].detail) == (30 * MiB, True)


def test_what_emptying_the_cache_gave_back() -> None:
    assert emptied_view(30, 100, 70).sentence == "Gave back 30 B of 30 B promised."
    more, less = emptied_view(30, 100, 60), emptied_view(30, 100, 110)
    assert (more.realised, more.extra, more.sentence) == (30, 10, "Gave back 30 B of 30 B promised, and 10 B more.")
    assert (less.realised, less.extra) == (0, 0)
    assert "ran at the same time" in less.sentence


def test_an_outcome_says_what_is_missing() -> None:
    plan = plan_cleanup(SCENES["stale"]().facts, Request())
    outcome = Outcome(
        plan=plan,
        done=plan.actions[:1],
        undone=(("last error", "it is held"),),
        realised=GiB,
        extra=5 * MiB,
        before=0,
        after=0,
        survivors=(("xb", 2 * GiB),),
        interrupted=True,
    )

    done = outcome_view(outcome, "clean_stale")

    assert done.sentence == (
        "Freed 1 GiB of 3.67 GiB promised, and 5 MiB more. Interrupted: the steps below were not done. Still held: xb 2 GiB."
    )
    assert (done.promised, done.realised, done.extra, done.undone) == (
        plan.promised,
        GiB,
        5 * MiB,
        (("last error", "it is held"),),
    )


def _with_workers(**fact: object) -> Facts:
    """Idle workers and a displayed Learner that is stale: only the workers are to be stopped."""
    graph = make_graph(
        {"dl": ["dl"], "Out[3]": ["old"]},
        {"dl": {"._iterator": "it"}, "it": {"._task_info": "batch"}},
        {"batch": 5 * MiB, "old": 9 * MiB},
        {"dl": "loader", "it": "iterator", "batch": "tensor", "old": "learner"},
    )
    node = {each.kind: number for number, each in enumerate(graph.nodes)}
    fact = {"loaders": (node["loader"],), "private": 3 * MiB} | fact
    workers = WorkersFact(node=node["iterator"], processes=(Process(12, 1.0), Process(13, 2.0)), **fact)  # type: ignore[arg-type]
    return replace(make_facts(graph), workers=(workers,))


def test_stop_workers_stops_workers_and_nothing_else() -> None:
    facts = _with_workers()
    plan = plan_cleanup(facts, request_of("stop_workers"))
    view = plan_view(plan, "stop_workers", "t")

    assert [action.kind for action in plan.actions] == ["workers"]
    assert plan.promised == 5 * MiB, "what only the iterator held, and not the stale Learner"
    assert {action.kind for action in plan_cleanup(facts, Request(workers=True)).actions} == {"workers", "out", "collect"}
    assert (view.title, view.confirm) == ("Stop workers: the plan", "End 2 workers")
    assert "the next epoch starts new workers" in view.irreversible
    outcome = Outcome(plan=plan, done=plan.actions, undone=(), realised=5 * MiB, extra=0, before=0, after=0, host=3 * MiB)
    done = outcome_view(outcome, "stop_workers")
    assert done.sentence == "Ended 2 workers; 3 MiB of host memory came back. Freed 5 MiB of 5 MiB promised."


def test_workers_in_use_are_not_stopped_and_said_to_go_on() -> None:
    view = plan_view(plan_cleanup(_with_workers(is_in_use=True), request_of("stop_workers")), "stop_workers", "t")

    assert view.token == ""
    assert view.refused == "No DataLoader worker process is idle, so there is nothing to stop."
    assert "keep running: running code uses them" in view.skipped[0]


def test_unused_pinned_memory_goes_with_the_workers() -> None:
    facts = replace(SCENES["training"]().facts, pinned=PinnedFacts(2 * MiB, 10 * MiB))
    plan = plan_cleanup(facts, request_of("stop_workers"))
    view = plan_view(plan, "stop_workers", "t")

    assert [(action.kind, action.host) for action in plan.actions] == [("pinned", 8 * MiB)]
    assert (view.confirm, view.irreversible) == ("Give host memory back", "")
    nothing = replace(facts, pinned=PinnedFacts(2 * MiB, 2 * MiB))
    assert plan_view(plan_cleanup(nothing, request_of("stop_workers")), "stop_workers", "t").refused


def _shared_with_leftovers() -> Facts:
    """A batch that the last error and the failed Learner hold, and one that only the error does."""
    graph = make_graph(
        {"learn": ["learn"], "last error": ["error"]},
        {"learn": {".xb": "batch"}, "error": {" → fit": "fit"}, "fit": {" → xb": "batch", " → loss": "loss"}},
        {"batch": 5 * MiB, "loss": 3 * MiB},
        {"learn": "learner", "error": "traceback", "fit": "frame", "batch": "tensor", "loss": "tensor"},
    )
    return make_facts(graph, [LearnerFact(0, False, ("Learner", "Net"), ("xb",))])


def test_while_a_cell_runs_only_what_cannot_touch_it_is_done_and_promised() -> None:
    """What a Learner's leftovers hold, too, does not come back from the error alone: it must not be promised."""
    facts = _shared_with_leftovers()
    whole = plan_cleanup(facts, request_of("clean_stale"))
    busy = plan_cleanup(facts, request_of("clean_stale", while_busy=True))

    assert (whole.promised, [action.kind for action in whole.actions]) == (8 * MiB, ["leftovers", "error", "collect"])
    assert (busy.promised, [action.kind for action in busy.actions]) == (3 * MiB, ["error", "collect"])
    assert [label for label, _ in rest_of(whole)] == [whole.actions[0].undone]
    assert rest_of(busy) == ()
    assert waits_for_cell("clean_stale", busy) == ""
    assert waits_for_cell("clean_stale", whole).endswith("it is cleaned when the cell ends")


def test_what_waits_for_the_cell() -> None:
    kinds = {action: waits_for_cell(action) for action in get_args(ActionName)}

    assert kinds["empty_cache"] == ""
    assert all(kinds[action].endswith("when the cell ends") for action in ("release", "park", "unpark", "stop_workers"))
    stale = plan_cleanup(SCENES["stale"]().facts, Request(while_busy=True))
    leftovers = Plan(
        request=Request(),
        actions=(
            Action(kind="leftovers", subject="xb", participle="cleared", nbytes=5),
            Action(kind="collect", subject="cycles", participle="collected", nbytes=0),
        ),
        promised=5,
    )
    assert waits_for_cell("clean_stale", stale) == ""
    assert waits_for_cell("clean_stale", leftovers).endswith("it is cleaned when the cell ends")
    assert waits_for_cell("clean_stale", plan_cleanup(SCENES["idle"]().facts, Request())) == ""


@pytest.mark.parametrize("action", ["empty_cache", "park", "unpark"])
def test_what_is_no_cleanup_makes_no_request(action: ActionName) -> None:
    """An empty request means: all that is stale."""
    with pytest.raises(ValueError, match="no cleanup"):
        request_of(action)


def test_long_names_are_cut() -> None:
    name = "x" * 10_000
    plan = Plan(
        request=Request(targets=(Target(text=name, root=name),)),
        actions=(Action(kind="del", subject=name, participle="deleted", nbytes=5, detail=name),),
        promised=5,
        skipped=(name,),
    )
    view = plan_view(plan, "release", "t")

    texts = [view.title, view.confirm, view.irreversible, *view.skipped, *(row.label + row.detail for row in view.rows)]
    assert max(map(len, texts)) <= 400
    assert all("…" in text for text in texts)
