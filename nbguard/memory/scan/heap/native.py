"""The compiled part of the heap walk, where there is one. Python does the same without it, several times slower."""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any

_INTERFACE = 5
"""Of the compiled part that this version calls. One that an earlier build left behind has another."""


def _load() -> tuple[Any, str]:
    """Return the compiled module and an empty text, or None and the reason why Python walks."""
    if os.environ.get("NBGUARD_PURE", "0") not in ("", "0"):
        return None, "NBGUARD_PURE is set"
    if sys.implementation.name != "cpython":
        return None, f"this Python is {sys.implementation.name}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None, "this Python is built without the GIL"
    try:
        from nbguard.memory.scan.heap import _heapwalk  # type: ignore[attr-defined]
    except ImportError:
        return None, "nbguard was installed without its compiled part"
    if _heapwalk.INTERFACE != _INTERFACE:
        return None, "the compiled part is of another version of nbguard: install it again"
    return _heapwalk, ""


compiled, why_pure = _load()
