"""The losses of a fit so far, and the first that jumps: what a loss that is not finite came from often shows before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from nbguard.profiler.analysis.health.nonfinite import LossGrowth
from nbguard.profiler.instruments.nonfinite.rerun import ForwardCall, NotPossibleError
from nbguard.scan.heap.kinds import mro_of

_KEPT = 16
_STABLE = 5
"""Losses before one that jumps."""
JUMP = 1e4
"""Times the largest of those before it, and at least this, that a loss is which jumps."""


class LossHistory:
    """Losses in host memory, in their order. Keeps numbers only."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self.first: float | None = None  # loss of the fit
        self.usual_peak: float | None = None  # largest value of the first batch's inputs, by magnitude

    @property
    def last(self) -> float | None:
        """Return the latest loss."""
        return self._latest[-1] if self._latest else None

    @property
    def usual(self) -> float:
        """Return the largest of the latest losses but the last, by magnitude."""
        return max(map(abs, list(self._latest)[:-1]), default=0.0)

    def growth(self, rate: float | None) -> LossGrowth | None:
        """Return the losses at both ends, if there were enough."""
        if self.first is None or len(self._latest) < _STABLE:
            return None
        return LossGrowth(self.first, median(self._latest), rate)

    def note(self, value: float, calls: Iterable[ForwardCall]) -> bool:
        """Note a finite loss, and say whether it jumps."""
        if self.first is None:
            self.first, self.usual_peak = value, peak_of(self._torch, calls)
        latest = self._latest
        jumps = abs(value) > JUMP and len(latest) >= _STABLE and abs(value) > JUMP * max(map(abs, latest))
        latest.append(value)
        return jumps


def peak_of(torch: Any, calls: Iterable[ForwardCall]) -> float | None:
    """Return the largest finite magnitude in the inputs of models in host memory; None where there is none."""
    peak = None
    for call in calls:
        try:
            inputs = call.inputs()
        except NotPossibleError:
            continue
        for tensor in torch.utils._pytree.tree_leaves(inputs):
            largest = largest_of(torch, tensor)
            peak = largest if peak is None or (largest is not None and largest > peak) else peak
    return peak


def largest_of(torch: Any, tensor: Any) -> float | None:
    """Return the largest finite magnitude in a tensor of floating point numbers in host memory; None of any other."""
    if torch.Tensor not in mro_of(type(tensor)):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if not (tensor.is_cpu and tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel()):
            return None
        return float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().amax())
