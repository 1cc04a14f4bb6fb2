"""The end of the cell that runs now, for actions that a magic in it began."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class CellEnd:
    """Calls `act(result)` once, with IPython's result, when the cell that runs now ends.

    It is called before the other listeners at the end of each cell, whose time, as for a scan of the heap, is not the cell's.
    Cells inside this one and cells of other threads (subshells) are not taken for it.
    """

    def __init__(
        self, shell: Any, act: Callable[[Any], None], failed: Callable[[BaseException | None], None] | None = None
    ) -> None:
        """`failed(error)` is called where the cell failed, before IPython draws the traceback, which may take seconds."""
        self._shell = shell
        self._failed = failed
        self._show = shell.showtraceback
        if failed is not None:
            self._before = vars(shell).get("showtraceback")
            shell.showtraceback = self._shows
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
        if self._failed is not None and vars(self._shell).get("showtraceback") == self._shows:
            if self._before is None:
                del self._shell.showtraceback
            else:
                self._shell.showtraceback = self._before
        for event, function in (("pre_run_cell", self._begins), ("post_run_cell", self._ended)):
            if function in self._events.callbacks[event]:
                self._events.unregister(event, function)

    def _shows(self, *args: Any, **named: Any) -> Any:
        """Show a traceback, after `failed` where it is the one of the cell's own code."""
        __tracebackhide__ = True
        is_cells = named.get("running_compiled_code") and not self._inside and threading.get_ident() == self._thread
        if is_cells and self._failed is not None:
            with suppress(Exception):  # the user's traceback comes in any case
                self._failed(sys.exc_info()[1])
        return self._show(*args, **named)

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
