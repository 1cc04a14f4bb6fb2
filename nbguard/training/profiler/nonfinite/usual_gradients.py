"""A small gradient of each optimizer that tells whether a step is skipped, and skips in a row."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from nbguard.training.profiler.analysis.nonfinite import Origin
from nbguard.training.profiler.checks.parameter_groups import groups_of
from nbguard.training.profiler.nonfinite.operations.operation_search import OperationSearch
from nbguard.training.profiler.nonfinite.operations.source_lines import StepValues

_PERSISTS = (3, 12)
"""Steps skipped in a row until the operation is looked for: by the second time a scale fell far enough."""


class SkippedSteps:
    """Counts the steps that are skipped in a row, and looks for the operation once that is no search for the scale's level.

    `origin`: of their gradients, or None without one or if unknown.
    """

    def __init__(self, search: OperationSearch) -> None:
        self.origin: Origin | None = None
        self._search = search
        self._count = 0

    def note(self, models: list[Any], values: tuple[float, ...]) -> None:
        """Note for each optimizer whether its gradients were not finite (1.0), as the scaler's flags say."""
        self._count = self._count + 1 if any(values) else 0
        if self._count not in _PERSISTS:
            return
        if self._search.records_each:
            self.origin = self._search.now(StepValues.none(), models) or self.origin
        else:
            self._search.follow(StepValues.none(), self._is)

    def _is(self, origin: Origin) -> None:
        self.origin = origin


def as_one_number(torch: Any, tensor: Any) -> Any | None:
    """Return a loss, or the largest value of several, as a tensor of one value; None if it has no floating point values."""
    count = tensor.numel()
    if not count or not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    values = tensor.detach()
    if count > 1:
        return values.abs().amax()
    return values.reshape(()) if values.dim() > 1 else values


def has_gradient(torch: Any, parameter: Any) -> bool:
    """Say whether a parameter has a gradient with values in memory of its own."""
    gradient = parameter.grad
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.numel() > 0


def by_kind(parameters: list[Any]) -> list[list[Any]]:
    """Return parameters in lists whose gradients are of one device and type."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        kinds.setdefault((gradient.device, gradient.dtype), []).append(parameter)
    return list(kinds.values())


_SMALL = 2**14
"""Values of a gradient that every step looks at."""


class UsualGradients:
    """Looks at the gradient of one small parameter of each optimizer, the first: the backward pass comes to it late."""

    def __init__(self) -> None:
        self._checked: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}  # optimizer and parameter, by id

    def start(self, torch: Any) -> None:
        """Look nothing up any more, as every step asks."""
        base = torch._C.TensorBase
        self._torch, self._tensor, self._sum, self._item = torch, torch.Tensor, base.sum, base.item

    def note(self, optimizer: Any, parameters: list[Any]) -> None:
        """Choose among the parameters of an optimizer that have a gradient."""
        small = next((p for p in parameters if p.grad.is_cpu and p.grad.numel() <= _SMALL), None)
        if small is not None:
            self._checked[id(optimizer)] = weakref.ref(optimizer), weakref.ref(small)

    def is_usual(self, optimizer: Any) -> bool:
        """Say whether the gradient that was chosen is finite, or is none in host memory."""
        return self._is_usual(self._checked.get(id(optimizer)))

    def _is_usual(self, checked: tuple[weakref.ref[Any], weakref.ref[Any]] | None) -> bool:
        parameter = None if checked is None else checked[1]()
        gradient: Any = None if parameter is None else parameter.grad
        if type(gradient) is not self._tensor or not gradient.is_cpu:
            return True
        value = self._item(self._sum(gradient))
        return bool(value - value == 0)

    def are_usual(self) -> bool:
        """Say so of all optimizers."""
        return all(map(self._is_usual, self._checked.values()))

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters of all optimizers that have a gradient."""
        for reference, _ in self._checked.values():
            for group in () if (optimizer := reference()) is None else groups_of(optimizer):
                yield from (p for p in group.parameters if has_gradient(self._torch, p))

    def forget(self) -> None:
        """Hold nothing any more."""
        self._checked.clear()
