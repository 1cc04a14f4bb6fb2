"""The hooks that a module of PyTorch's has, as the user put them up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbguard.memory.scan.heap.attributes import attribute_of

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: Any) -> Iterator[dict[int, Any]]:
    """Yield the dicts that keep a module's hooks, by their numbers; only those that have any."""
    for kind in _KINDS:
        hooks = attribute_of(module, kind)
        if hooks:
            yield hooks
