"""An out-of-memory error at one operation of a batch, and small trainings to plant it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."
_OTHERS = ("_", "_out", "_local_scalar_dense")
"""Ends of the names of operations that allocate nothing."""


class Planted(TorchDispatchMode):  # type: ignore[misc]
    """Raises once, at the n-th operation that allocates while it is armed; never with 0."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.count, self.is_armed, self.has_raised = at, 0, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.is_armed and func.namespace == "aten" and not func.is_view and not name.endswith(_OTHERS):
            self.count += 1
            if self.count == self.at:
                self.has_raised = True
                raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


class TooLarge(TorchDispatchMode):  # type: ignore[misc]
    """Raises whenever an operation of a layer returns more than so many rows: a device that has room for a piece alone."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default and result.shape[0] > self.rows:
            raise torch.OutOfMemoryError(MESSAGE)
        return result


def net() -> nn.Module:
    """Return a small model without random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference between two states of the same structure: dicts, lists, tensors, numbers."""
    if isinstance(one, dict):
        return max((largest_difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max(map(largest_difference, one, other), default=0.0)
    if isinstance(one, torch.Tensor):
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    return abs(one - other) if isinstance(one, float) else 0.0 if one == other else 1.0


def every_place(run: Callable[[int], Planted], last: int = 500) -> int:
    """Plant an error at each operation of a batch until there is no further one; return how many there were."""
    for at in range(1, last):
        if not run(at).has_raised:
            return at - 1
    raise AssertionError("the batch never ends")
