"""The IPython shell of this process, and the host where there is none; neither IPython nor marimo is imported."""

from __future__ import annotations

import sys
from typing import Any


def running_shell() -> Any:
    """Return IPython's shell, or None where this process runs without one: a script, marimo, a rank."""
    ipython = sys.modules.get("IPython")  # None as well while it is being imported: it has no function then
    return getattr(ipython, "get_ipython", lambda: None)()


def host() -> str:
    """Return the name of the program that the user starts to have this process: Jupyter, marimo, else Python itself."""
    if running_shell() is not None:
        return "Jupyter"
    marimo = sys.modules.get("marimo")
    return "marimo" if getattr(marimo, "running_in_notebook", lambda: False)() else "Python"
