"""The desk of the hub: the last look at the heap, and what is answered to requests. Made when somebody first looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbguard.api import why_in
from nbguard.errors import NbguardError, OldHeapError
from nbguard.scan.scan import Notebook
from nbguard.sidebar.builtins import plain
from nbguard.sidebar.hub.memory_states import Heaps
from nbguard.sidebar.hub.plans import Plans, Wanted
from nbguard.sidebar.protocol.messages import Apply, Ask, PlanRequest
from nbguard.sidebar.protocol.rows import Rows
from nbguard.sidebar.protocol.state import PlanView
from nbguard.sidebar.protocol.why import why_view

_CANNOT = {
    "why": "there is nothing to explain about this row",
    "release": "these rows cannot be released: no name of yours holds them alone",
    "park": "these rows cannot be parked: that is for experiments and tensors that no fit uses",
}


class Desk:
    """Has the last heap, and the plans that were shown."""

    def __init__(self, notebook: Callable[[], Notebook], boot: str) -> None:
        self._notebook = notebook
        self.heaps = Heaps(notebook, boot)
        self.plans = Plans(notebook)

    def answer(self, asked: Ask | PlanRequest | Apply) -> tuple[str, dict[str, Any]]:
        """Return the answer to a request: its `op`, and what goes with it. Raises NbguardError to refuse it."""
        match asked:
            case Ask(_, heap, id):
                return "why", {"why": plain(why_view(why_in(self._notebook(), self._texts("why", heap, (id,))[0])))}
            case PlanRequest():
                return "plan", {"plan": plain(self._plan(asked))}
            case Apply(_, token):
                found = self.plans.apply(token)
                self.heaps.offer(self.plans.take_measured())
                return ("plan", {"plan": plain(found)}) if isinstance(found, PlanView) else ("done", {"outcome": plain(found)})

    def _plan(self, asked: PlanRequest) -> PlanView:
        texts = asked.names if asked.action == "unpark" else ()
        if asked.action in ("release", "park"):
            texts = self._texts(asked.action, asked.heap, asked.ids)
        return self.plans.show(Wanted(asked.action, texts, asked.keep))

    def _texts(self, what: str, heap: int | None, ids: tuple[int, ...]) -> tuple[str, ...]:
        """Return what rows of the last heap are called in the notebook."""
        if heap != self.heaps.last.heap:
            raise OldHeapError
        rows: Rows | None = self.heaps.rows
        texts = None if rows is None else rows.texts(what, ids)
        if not texts:
            raise NbguardError(_CANNOT[what])
        return texts
