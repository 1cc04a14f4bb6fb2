"""The names that a cleanup has deleted, for those who have to know: `%gpumem why NAME` answers for them as after `del NAME`."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbguard.memory.cleanup.plan.plan import Action, Plan
    from nbguard.memory.scan.scan import Scan
    from nbguard.memory.scan.weak_holdings import WeakHoldings


# --- Ctrl-C during a cleanup, which stops the current step, while the steps done are still measured and reported.


class Interrupts:
    """While entered, SIGINT raises KeyboardInterrupt only inside `allowed()`; elsewhere it is noted in `happened`.

    Only the main thread gets signals: in any other this changes nothing. The handler that was there comes back at the end.
    """

    def __init__(self) -> None:
        self.happened: bool = False
        self._allowed = False
        self._former: Any = None
        self._installed = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._former if self._former is not None else signal.SIG_DFL)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.happened = True
        if self._allowed:
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let SIGINT raise KeyboardInterrupt inside the block."""
        try:
            self._allowed = True
            yield
        finally:
            self._allowed = False


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReleasedName:
    """A name that a cleanup has deleted, with the object it led to."""

    name: str
    what: str  # the object in a few words
    holdings: WeakHoldings
    command: str  # of the cleanup: `%reset_gpu net`, whichever surface it was asked for by


listeners: list[Callable[[ReleasedName], None]] = []
"""Called for each name that a cleanup has deleted."""


def tell_released(plan: Plan, done: Iterable[Action], scanned: Scan) -> None:
    """Tell the listeners of the names that these steps have deleted; `scanned` is the scan before them."""
    from nbguard.memory.core.advice import EVERYTHING, release_names
    from nbguard.memory.core.references.graph import reach_of_roots, storages_of
    from nbguard.memory.scan.weak_holdings import WeakHoldings

    graph, weak = scanned.facts.graph, scanned.tracker.storages
    names = [action.names[0] for action in done if action.kind == "del"]
    command = (EVERYTHING if plan.request.everything else release_names(names)).command
    for number, root in enumerate(graph.roots):
        if root.kind == "name" and root.label in names:
            storages = storages_of(graph, reach_of_roots(graph, (number,)))
            holdings = WeakHoldings(tuple((graph.storages[n], weak[n]) for n in sorted(storages) if weak[n]), frozenset())
            for listener in tuple(listeners):
                try:
                    listener(ReleasedName(root.label, root.what, holdings, command))
                except Exception:  # noqa: BLE001 - a cleanup must not fail because of who listens
                    _log.debug("a listener to released names failed", exc_info=True)
