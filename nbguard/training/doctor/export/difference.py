"""Two models' outputs for one batch, compared."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from nbguard.training.doctor.analysis.export import ValueDifference


def difference(items: int, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> ValueDifference:
    """Return the largest difference of two lists of outputs."""
    largest, scale = 0.0, 0.0
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in theirs]:
        return ValueDifference(items=items, largest=inf, relative=inf)
    for one, other in zip(mine, theirs, strict=True):
        if not one.numel():
            continue
        exact, close = (tensor.detach().double().cpu() for tensor in (plain(one), plain(other)))
        other = ~((exact == close) | (exact.isnan() & close.isnan()))
        largest = max(
            largest, float((exact - close).abs()[other].nan_to_num(nan=inf, posinf=inf).max()) if other.any() else 0.0
        )
        finite = exact[exact.isfinite()].abs()
        scale = max(scale, float(finite.max()) if finite.numel() else 0.0)
    return ValueDifference(items=items, largest=largest, relative=largest / scale if scale else largest)


def plain(tensor: Any) -> torch.Tensor:
    """Return a tensor of a subclass as one of PyTorch's own, without a copy."""
    with torch._C.DisableTorchFunctionSubclass():
        own: torch.Tensor = tensor.as_subclass(torch.Tensor)
        return own
