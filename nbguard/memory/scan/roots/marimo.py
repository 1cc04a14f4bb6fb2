"""The errors of failed cells that marimo keeps until each cell runs again, and with them all that the failed code had.

Private fields of marimo are read: nothing is known of a release that has them elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def errors_of_cells() -> Iterator[BaseException]:
    """Yield the errors that the cells of this thread's marimo notebook ended with. Does not import marimo."""
    try:
        statuses = [cell._run_result_status for cell in tuple(_context().graph.cells.values())]
        errors = [status.exception for status in statuses]
    except (AttributeError, RuntimeError):  # RuntimeError: cells came or went in another thread
        return
    yield from (error for error in errors if isinstance(error, BaseException))


def machinery() -> Iterator[Any]:
    """Yield the objects that run this thread's notebook in marimo, which each element of its interface leads to."""
    context = _context()
    kernel = getattr(context, "_kernel", None)
    yield from (each for each in (context, kernel, getattr(kernel, "graph", None)) if each is not None)


def _context() -> Any:
    """Return marimo's context of this thread; None where there is none."""
    module = sys.modules.get("marimo._runtime.context.types")
    return getattr(module, "safe_get_context", lambda: None)()
