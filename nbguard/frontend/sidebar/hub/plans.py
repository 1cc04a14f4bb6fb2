"""Plans that were shown to a view, and the handler of requests, which does nothing that was not agreed to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbguard.api import why_in
from nbguard.errors import NbguardError, NoTorchError, OldHeapError
from nbguard.frontend.sidebar.hub.memory_states import MemoryStates
from nbguard.frontend.sidebar.memory_line import report_picture
from nbguard.frontend.sidebar.protocol.messages import (
    Answer,
    Apply,
    Ask,
    Done,
    Explained,
    MomentRequest,
    MomentShown,
    Pictured,
    Planned,
    PlanRequest,
    Predicted,
    PredictRequest,
    Question,
    why_view,
)
from nbguard.frontend.sidebar.protocol.plan_views import (
    cache_view,
    does_something,
    emptied_view,
    outcome_view,
    plan_view,
    request_of,
    rest_of,
    unpark_view,
    unparked_view,
    waits_for_cell,
)
from nbguard.frontend.sidebar.protocol.rows import Rows
from nbguard.frontend.sidebar.protocol.state import ActionName, MomentView, Now, OutcomeView, PlanView
from nbguard.memory.cleanup.apply.apply import apply, bring_back, uncover
from nbguard.memory.cleanup.apply.kept_by_torch import empty_cache, note_left_pools
from nbguard.memory.cleanup.plan.parking import plan_parking
from nbguard.memory.cleanup.plan.plan import Plan
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.facts import Facts, PoolId
from nbguard.memory.core.references.explain import Why, explain_root, explain_unheld
from nbguard.memory.core.requests import doubtful_pools, left_pools
from nbguard.memory.reports.cell_ledger import names_of
from nbguard.memory.reports.report import build_report
from nbguard.memory.scan.devices.counters import Counters
from nbguard.memory.scan.parked import fixed_storages, parked_facts
from nbguard.memory.scan.scan import Notebook, Scan, TimedScan, scan
from nbguard.memory.scan.shown_targets import targets_of, with_hooks

if TYPE_CHECKING:
    from nbguard.memory.snapshots.moment import RecordedHistory

_KEPT = 20
_VALID = 3600.0
"""Most seconds until a plan is agreed to."""
_GONE = "this plan is no longer known; ask for a new one"

Step = tuple[str, str, int]
"""(kind, name, id of the object) of something that a plan does: ids tell that a name has another object since."""


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """An action that a view asks for, on the objects that `texts` name, without the steps that `keep` names."""

    action: ActionName
    texts: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenPlan:
    """A plan that a view shows. Its ids serve only the comparison with a later plan."""

    wanted: OperationRequest  # the request it was made for
    promised: int  # bytes
    since: float  # time.monotonic() of the showing
    plan: Plan | None = None  # None where nothing is freed: the cache, unparking
    steps: frozenset[Step] = frozenset()  # that a later plan is compared with
    unkept: frozenset[PoolId] = frozenset()  # of the cache: private pools that nothing known keeps


class Plans:
    """Makes plans and applies them by the token that they were shown with.

    Args:
        notebook: returns where the names live, and whether a cell runs beside the thread that asks.
    """

    def __init__(self, notebook: Callable[[], Notebook]) -> None:
        self._notebook = notebook
        self._measured: TimedScan | None = None
        self._shown: dict[str, _OpenPlan] = {}

    def show(self, wanted: OperationRequest) -> PlanView:
        """Return the plan of `wanted`, with a token to carry it out by. Nothing is touched."""
        token, unkept = secrets.token_urlsafe(12), frozenset[PoolId]()
        match wanted.action:
            case "empty_cache":
                facts = scan(self._notebook()).facts
                view, plan, steps = cache_view(facts, token), None, frozenset[Step]()
                unkept = doubtful_pools(facts) | left_pools(facts)
            case "unpark":
                view = unpark_view(parked_facts(), wanted.texts, token, *self._when("unpark"), wanted.keep)
                plan, steps = None, frozenset[Step]()
            case action:
                plan, seen, rest = self._make(wanted)
                noted = replace(plan, skipped=plan.skipped + tuple(f"{label}: {why}" for label, why in rest))
                view = plan_view(noted, action, token, *self._when(action, plan))
                steps = steps_of(plan, seen.facts)
        if view.token:
            self._remember(
                token,
                _OpenPlan(
                    wanted=wanted,
                    promised=view.promised,
                    since=time.monotonic(),
                    plan=plan,
                    steps=steps,
                    unkept=unkept,
                ),
            )
        return view

    def about(self, token: str) -> tuple[str, str]:
        """Return the effect of the plan of `token` in two words, and why it waits while a cell runs ("" if it need not)."""
        shown = self._shown.get(token)
        if shown is None:
            return "Apply", ""
        action = shown.wanted.action
        return " ".join([action.replace("_", " ").capitalize(), *shown.wanted.texts]), waits_for_cell(action, shown.plan)

    def apply(self, token: str) -> OutcomeView | PlanView:
        """Carry out an agreed plan, and return its outcome, or the plan again if it would do anything else by now.

        Raises:
            NbguardError: there is no such plan, or it cannot be done; nothing was touched.
        """
        shown = self._shown.pop(token, None)
        if shown is None or time.monotonic() > shown.since + _VALID:
            raise NbguardError(_GONE)
        match shown.wanted.action:
            case "empty_cache":
                before = _reserved()
                empty_cache()
                note_left_pools(shown.unkept)
                return emptied_view(shown.promised, before, _reserved())
            case "unpark":
                names = shown.wanted.texts or tuple(dict.fromkeys(fact.label for fact in parked_facts()))
                return unparked_view(bring_back([name for name in names if name not in shown.wanted.keep]), shown.promised)
        return self._apply(shown)

    def take_measured(self) -> TimedScan | None:
        """Return the scan that measured the outcome of the last `apply`, if it needed one, and forget it."""
        measured, self._measured = self._measured, None
        return measured

    def _apply(self, shown: _OpenPlan) -> OutcomeView | PlanView:
        wanted, notebook = shown.wanted, self._notebook()
        uncovered = 0 if notebook.is_running or wanted.action == "park" else uncover()
        plan, seen, rest = self._make(wanted)
        steps = steps_of(plan, seen.facts)
        if steps - shown.steps or (notebook.is_running and waits_for_cell(wanted.action, plan)):
            return self.show(wanted)
        cleaned = apply(plan, notebook, seen, uncovered)
        self._measured = cleaned.after
        outcome = replace(cleaned.outcome, undone=cleaned.outcome.undone + rest)
        parked = {fact.label for fact in parked_facts()} if wanted.action == "park" else set()
        return outcome_view(outcome, wanted.action, tuple(text for text in wanted.texts if text in parked))

    def _make(self, wanted: OperationRequest) -> tuple[Plan, Scan, tuple[tuple[str, str], ...]]:
        """Return the plan for the present state, its sources, and (step, why) of the parts that stay while a cell runs."""
        notebook = self._notebook()
        texts = tuple(text for text in wanted.texts if text not in wanted.keep)
        if wanted.texts and not texts:
            raise NbguardError("every step was left out, so there is nothing to do")
        targets = targets_of(texts, notebook)
        seen = scan(notebook, tensors=wanted.action == "park")
        if wanted.action == "park":
            parking = plan_parking(seen.facts, targets, fixed_storages(seen.tracker))
            return replace(parking, request=replace(parking.request, keep=wanted.keep)), seen, ()
        targets = with_hooks(targets, notebook, seen.tracker)
        is_for_later = notebook.is_running and wanted.action == "release"
        whole = plan_cleanup(seen.facts, request_of(wanted.action, targets, wanted.keep), is_for_later=is_for_later)
        if wanted.action == "clean_stale" and notebook.is_running:
            beside = plan_cleanup(seen.facts, request_of(wanted.action, targets, wanted.keep, while_busy=True))
            if does_something(beside):
                return beside, seen, rest_of(whole)
        return whole, seen, ()

    def _when(self, action: ActionName, plan: Plan | None = None) -> tuple[Now, str]:
        why = waits_for_cell(action, plan) if self._notebook().is_running else ""
        return ("cell_end", why) if why else ("now", "")

    def _remember(self, token: str, shown: _OpenPlan) -> None:
        self._shown[token] = shown
        for old in list(self._shown)[:-_KEPT]:
            self._shown.pop(old, None)


def steps_of(plan: Plan, facts: Facts) -> frozenset[Step]:
    """Return the effect of a plan, step by step. Collecting garbage needs nobody's consent."""
    names = names_of(facts.graph)
    objects = {target.text: target.value or names.get(target.root, 0) for target in plan.request.targets}
    steps = set[Step]()
    for action in plan.actions:
        if action.kind == "collect":
            continue
        refs = (0,) if action.kind in ("del", "park") else action.refs or (0,)
        steps |= {(action.kind, name, objects.get(name, ref)) for name in action.names or ("",) for ref in refs}
        steps |= {(action.kind, "process", process.pid) for process in action.processes}
    return frozenset(steps)


def _reserved() -> int:
    """Return the bytes that the allocators of all devices have now."""
    reading = Counters().read()
    return 0 if reading is None else sum(each.reserved or 0 for each in reading.devices)


# --- The handler of requests: the last memory state, the plans that were shown, the answers. Made for the first view.


_CANNOT = {
    "why": "there is nothing to explain about this row",
    "predict": "this row has no fit to predict, because it is not a Learner or is training now",
    "release": "these rows cannot be released, because no name of yours alone holds them",
    "park": "these rows cannot be parked; only experiments and tensors that no fit uses can",
}


class RequestHandler:
    """Answers requests from the last memory state and the plans that were shown.

    Args:
        notebook: returns where the names live.
        states: the memory states that were sent.
        predict: returns the memory of the next fit of the Learner of a name, in lines.
        history: returns the recorded history of the allocator.
    """

    def __init__(
        self,
        notebook: Callable[[], Notebook],
        states: MemoryStates,
        predict: Callable[[str], str],
        history: Callable[[], RecordedHistory],
    ) -> None:
        self._notebook = notebook
        self._predict = predict
        self._read_history = history
        self._history: RecordedHistory | None = None  # until the next cell: each event takes a hundred bytes and more
        self.states = states
        self.plans: Plans = Plans(notebook)

    def answer(self, asked: Question) -> tuple[Answer, bool]:
        """Return the answer to a request, and whether the last state is out of date: by a cleanup, or as a plan has shown.

        Raises NbguardError to refuse it.
        """
        match asked:
            case Ask(rid, heap, id):
                return Explained(rid, why_view(self._why(heap, id))), False
            case PredictRequest(rid, heap, id):
                return Predicted(rid, self._predict(self._texts("predict", heap, (id,))[0])), False
            case MomentRequest(rid, device, event):
                return MomentShown(rid, self._moment(device, event)), False
            case PlanRequest():
                plan = self._plan(asked)
                return Planned(asked.rid, plan), self._is_belied(plan, asked)
            case Apply(rid, token):
                self.forget_history()
                view = self.plans.apply(token)
                self.states.offer(self.plans.take_measured())
                return (Planned(rid, view), False) if isinstance(view, PlanView) else (Done(rid, view), True)

    def _is_belied(self, view: PlanView, asked: PlanRequest) -> bool:
        """Say whether a plan finds nothing stale where the last state has something: it was freed since."""
        return view.action == "clean_stale" and bool(view.refused) and not asked.keep and self.states.last.stale > 0

    def picture(self, rid: str) -> Pictured:
        """Return the picture of the last memory state. Raises NoTorchError if there is none."""
        states = self.states
        if states.analysis is None:
            raise NoTorchError
        return Pictured(rid, str(report_picture(build_report(states.analysis), states.look_for_ticks.cell, states.last.t)))

    def forget_history(self) -> None:
        """Drop the history, so that the next question reads it again."""
        self._history = None

    def _moment(self, device: int | None, event: int | None) -> MomentView:
        from nbguard.frontend.sidebar.protocol.moment import moment_view

        self._history = self._history or self._read_history()
        return moment_view(self._history, device, event)

    def _why(self, heap: int, row: int) -> Why:
        """Return why a row of the last memory state is alive, by its name, its root, or C++'s references."""
        rows = self._rows(heap)
        texts = None if rows is None else rows.texts("why", (row,))
        if rows is None or texts is None:
            raise NbguardError(_CANNOT["why"])
        if texts:
            return why_in(self._notebook(), texts[0])
        if not rows.roots[row]:
            return explain_unheld(rows.holders[row])
        why = explain_root(scan(self._notebook()).facts, rows.roots[row])
        if why is None:
            raise NbguardError(f"{rows.roots[row]} is no longer there")
        return why

    def _rows(self, heap: int | None) -> Rows | None:
        """Return the rows of the last memory state; OldHeapError if the view has another one."""
        if heap != self.states.last.heap:
            raise OldHeapError
        return self.states.rows

    def _plan(self, asked: PlanRequest) -> PlanView:
        texts = asked.names if asked.action == "unpark" else ()
        if asked.action in ("release", "park"):
            texts = self._texts(asked.action, asked.heap, asked.ids)
        return self.plans.show(OperationRequest(asked.action, texts, asked.keep))

    def _texts(self, what: str, heap: int | None, ids: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names in the notebook of rows of the last memory state."""
        rows = self._rows(heap)
        texts = None if rows is None else rows.texts(what, ids)
        if not texts:
            raise NbguardError(_CANNOT[what])
        return texts
