"""The handler of requests: the last memory state, the plans that were shown, the answers. Made for the first view."""

from __future__ import annotations

from collections.abc import Callable

from nbguard.api import why_in
from nbguard.errors import NbguardError, NoTorchError, OldHeapError
from nbguard.frontend.sidebar.hub.memory_states import MemoryStates
from nbguard.frontend.sidebar.hub.plans import OperationRequest, Plans
from nbguard.frontend.sidebar.picture import report_picture
from nbguard.frontend.sidebar.protocol.answers import Answer, Done, Explained, Foreseen, Pictured, Planned
from nbguard.frontend.sidebar.protocol.messages import Apply, Ask, ForeseeRequest, PlanRequest, Question
from nbguard.frontend.sidebar.protocol.rows import Rows
from nbguard.frontend.sidebar.protocol.state import PlanView
from nbguard.frontend.sidebar.protocol.why import why_view
from nbguard.memory.core.references.explain import Why, explain_root
from nbguard.memory.core.references.explain_unheld import explain_unheld
from nbguard.memory.reports.report import build_report
from nbguard.memory.scan.scan import Notebook, scan

_CANNOT = {
    "why": "there is nothing to explain about this row",
    "foresee": "this row has no fit to predict, because it is not a Learner or is training now",
    "release": "these rows cannot be released, because no name of yours alone holds them",
    "park": "these rows cannot be parked; only experiments and tensors that no fit uses can",
}


class RequestHandler:
    """Answers requests from the last memory state and the plans that were shown.

    Args:
        notebook: returns where the names live.
        states: the memory states that were sent.
        foresee: returns the memory of the next fit of the Learner of a name, in lines.
    """

    def __init__(self, notebook: Callable[[], Notebook], states: MemoryStates, foresee: Callable[[str], str]) -> None:
        self._notebook = notebook
        self._foresee = foresee
        self.states = states
        self.plans = Plans(notebook)

    def answer(self, asked: Question) -> tuple[Answer, bool]:
        """Return the answer to a request, and whether the last state is out of date: by a cleanup, or as a plan has shown.

        Raises NbguardError to refuse it.
        """
        match asked:
            case Ask(rid, heap, id):
                return Explained(rid, why_view(self._why(heap, id))), False
            case ForeseeRequest(rid, heap, id):
                return Foreseen(rid, self._foresee(self._texts("foresee", heap, (id,))[0])), False
            case PlanRequest():
                plan = self._plan(asked)
                return Planned(asked.rid, plan), self._is_belied(plan, asked)
            case Apply(rid, token):
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
