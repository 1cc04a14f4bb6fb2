"""torch.compile, and whether it compiled anything in this process."""

from __future__ import annotations

import sys
from typing import Any


def has_compiled() -> bool:
    """Say whether a compiler backend has been used since the last reset. Optimizers import the compiler without using it."""
    module: Any = sys.modules.get("torch._dynamo.eval_frame")
    known = getattr(module, "cached_backends", None)
    if module is None or type(known) is not dict:
        return module is not None
    return any(backend is not None for backend in known.values())  # None if code that is not to be compiled has run


def name_in_model(name: str) -> str:
    """Return the name of a submodule as in the model that was compiled: torch.compile puts a step of its own into names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
