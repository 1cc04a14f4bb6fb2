"""Weak references to objects of the user's, of whatever class."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of


def weak_reference(obj: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to an object; None if its class has none, or none that can be trusted.

    PyTorch 2.11 frees streams and events of CUDA's without a word to their weak references: to follow one ends the process.
    """
    torch = sys.modules.get("torch")
    if torch is not None and any(cls in mro_of(type(obj)) for cls in (torch.cuda.Stream, torch.cuda.Event)):
        return None
    try:
        return weakref.ref(obj)
    except TypeError:
        return None
