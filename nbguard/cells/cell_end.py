"""The end of the cell that runs now, for what a magic in it has begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class CellEnd:
    """Calls `act(result)` once, with IPython's result, when the cell that runs now has ended.

    It is called before what others do at the end of each cell: their time, a look at the heap, is not the cell's. Cells inside
    this one and cells of other threads (subshells) are not taken for it.
    """

    def __init__(self, shell: Any, act: Callable[[Any], None]) -> None:
        self._events = shell.events
        self._act = act
        self._inside = 0
        self._thread = threading.get_ident()
        self._events.register("pre_run_cell", self._begins)
        self._events.register("post_run_cell", self._ended)
        callbacks = self._events.callbacks["post_run_cell"]
        callbacks.insert(0, callbacks.pop())

    def cancel(self) -> None:
        """Call nobody."""
        for event, function in (("pre_run_cell", self._begins), ("post_run_cell", self._ended)):
            if function in self._events.callbacks[event]:
                self._events.unregister(event, function)

    def _begins(self, _: Any) -> None:
        self._inside += threading.get_ident() == self._thread

    def _ended(self, result: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._inside:
            self._inside -= 1
            return
        self.cancel()
        self._act(result)
