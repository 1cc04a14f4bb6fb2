"""Leftovers of a strict export, as PyTorch 2.13 keeps each program, with the model's parameters, in a module's globals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MODULE = "torch._dynamo.functional_export"
_PREFIX = "__compiled_fn_"


@contextmanager
def left_globals_removed() -> Iterator[None]:
    """Take away the programs that strict exports within leave in PyTorch's globals; those that were there before stay."""
    before = set(_globals())
    try:
        yield
    finally:
        space = _globals()
        for name in [name for name in space if name.startswith(_PREFIX) and name not in before]:
            del space[name]


def _globals() -> dict[str, Any]:
    module = sys.modules.get(_MODULE)
    return {} if module is None else vars(module)
