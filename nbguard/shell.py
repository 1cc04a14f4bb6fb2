"""The IPython shell of this process, asked for without importing IPython."""

from __future__ import annotations

import sys
from typing import Any


def running_shell() -> Any:
    """Return IPython's shell, or None where this process runs without one: a script, marimo, a rank."""
    ipython = sys.modules.get("IPython")  # None as well while it is being imported: it has no function then
    return getattr(ipython, "get_ipython", lambda: None)()
