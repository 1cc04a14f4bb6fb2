"""Cells of the user that run now, and the kernel's status where ipykernel would call it idle meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from nbguard.memory.cells.hooks import cell_id_of, cells_on_stack


class Busy:
    """Knows of the cell that runs, from its beginning to its end.

    For every message that is handled while a cell runs, ipykernel publishes `busy` and then `idle`, and JupyterLab shows the
    kernel as idle from there on. `again` says `busy` once more, in the cell's name.
    """

    def __init__(self, shell: Any, kernel: Any) -> None:
        self._shell = shell
        self._kernel = kernel
        self._lock = threading.Lock()
        self._cell: int | None = None
        self._ended: int | None = None
        self._parent: Any = None

    @property
    def cell(self) -> int | None:
        """Return the number of the cell that runs; None if none does."""
        return self._cell

    @property
    def ended(self) -> int | None:
        """Return the number of the last cell that has ended; None if none has."""
        if self._ended is not None or self._cell is not None:
            return self._ended
        return len(self._shell.history_manager.input_hist_parsed) - 1 or None

    @property
    def cell_id(self) -> str:
        """Return the id of the current cell in its notebook, or "" without one or if the frontend does not tell it."""
        return cell_id_of(self._parent)

    def begin(self, *, is_running: bool = False) -> None:
        """Note, in the thread of the cell, that one begins, or that one is running already."""
        parent = self._kernel.get_parent("shell")
        stored = len(self._shell.history_manager.input_hist_parsed)  # IPython counts a cell now before, now after it has run
        with self._lock:
            self._cell, self._parent = stored - is_running, parent

    def end(self) -> int | None:
        """Note that it ended, and return its number. From here on nothing says `busy`: the kernel has the last word."""
        with self._lock:
            ended, self._cell, self._parent = self._cell, None, None
            self._ended = ended
        return ended

    def again(self) -> None:
        """Say `busy` again after the message that is handled now, if a cell runs: once the kernel has said `idle`."""
        if self._cell is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._say()
        else:
            loop.call_soon(self._say)  # the kernel says `idle` before its loop comes to this

    def _say(self) -> None:
        with self._lock:
            if self._cell is not None:
                state = {"execution_state": "busy"}
                self._kernel.session.send(self._kernel.iopub_socket, "status", state, parent=self._parent, ident=b"status")


def is_in_cell(shell: Any) -> bool:
    """Say whether a cell is running whose end IPython will announce; a silent one, such as a startup file, is not."""
    parent = getattr(shell, "parent_header", None)
    if type(parent) is not dict or not parent:  # nothing has been asked of the kernel yet
        return False
    return cells_on_stack() > 0 and not parent.get("content", {}).get("silent", False)
