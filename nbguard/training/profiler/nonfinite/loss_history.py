"""The losses of a fit so far, and the first that jumps before a non-finite loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.training.profiler.analysis.nonfinite import LossGrowth
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, NotPossibleError

_KEPT = 16
_STABLE = 5
"""Losses before one that jumps."""
JUMP = 1e4
"""Times the largest of those before it, and at least this, that a loss is which jumps."""


class LossHistory:
    """Losses in host memory, in their order. Keeps numbers only.

    `is_usual(loss)` notes a loss, and says so, if it is one finite number in host memory, not the first of the fit and no jump:
    then nobody need look at it more closely. A loss of a device it leaves to `send`. It raises where a loss has several values,
    or none in memory of its own.
    """

    def __init__(self, torch: Any, send: Callable[[Any], bool] | None = None) -> None:
        self._torch = torch
        self._plain, self._item = torch.Tensor, torch._C.TensorBase.item  # torch.Tensor's own may be somebody's
        self._own, self._strided = torch._C.DisableTorchFunctionSubclass, torch.strided
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self.is_usual, self._count = _usual_noter(self._latest, torch, send or _is_unusual)
        self.reset()

    def reset(self) -> None:
        """Forget the losses."""
        self._latest.clear()
        self.first: float | None = None  # loss of the fit
        self.usual_peak: float | None = None  # largest value of the first batch's inputs, by magnitude

    @property
    def count(self) -> int:
        """Return how many losses were noted as usual ones."""
        return self._count()

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

    def value_of(self, tensor: Any) -> float | None:
        """Return a loss that is one finite number in host memory, else None."""
        kind = type(tensor)
        if kind is self._plain:  # nobody's own class: nothing of theirs is called
            value = self._number(tensor)
        elif issubclass(kind, self._plain):
            with self._own():
                value = self._number(tensor)
        else:
            return None
        return value if type(value) is float and value - value == 0 else None

    def _number(self, tensor: Any) -> Any | None:
        """Return the value of a tensor that is one number in host memory, else None."""
        if not tensor.is_cpu or tensor.numel() != 1 or tensor.layout is not self._strided:
            return None
        return self._item(tensor)

    def note(self, value: float, calls: Iterable[ForwardCall]) -> bool:
        """Note a finite loss, and say whether it jumps."""
        if self.first is None:
            self.first, self.usual_peak = value, peak_of(self._torch, calls)
        latest = self._latest
        jumps = abs(value) > JUMP and len(latest) >= _STABLE and abs(value) > JUMP * max(map(abs, latest))
        latest.append(value)
        return jumps


def _is_unusual(_: Any) -> bool:
    return False


def _usual_noter(
    latest: deque[float], torch: Any, send: Callable[[Any], bool]
) -> tuple[Callable[[Any], bool], Callable[[], int]]:
    """Return `LossHistory.is_usual`, which looks nothing up as every batch calls it, and a function that counts its losses."""
    plain, item, own = torch.Tensor, torch._C.TensorBase.item, torch._C.DisableTorchFunctionSubclass
    note, most, least, count = latest.append, JUMP, -JUMP, 0

    def is_usual(loss: Any) -> bool:
        nonlocal count
        if type(loss) is plain:
            if not loss.is_cpu:
                return send(loss)
            value = item(loss)
        else:
            with own():
                if not loss.is_cpu:
                    return send(loss)
                value = item(loss)
        if type(value) is float and least <= value <= most and latest:
            note(value)
            count += 1
            return True
        return False

    return is_usual, lambda: count


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


def largest_parameter(torch: Any, models: Iterable[Any]) -> float | None:
    """Return the largest finite magnitude of the parameters of models; None where there is none."""
    values = (largest_of(torch, parameter) for model in models for parameter in model.parameters())
    return max((value for value in values if value is not None), default=None)


def largest_of(torch: Any, tensor: Any) -> float | None:
    """Return the largest finite magnitude in a tensor of floating point numbers in host memory; None of any other."""
    if torch.Tensor not in mro_of(type(tensor)):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if not (tensor.is_cpu and tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel()):
            return None
        return float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().amax())
