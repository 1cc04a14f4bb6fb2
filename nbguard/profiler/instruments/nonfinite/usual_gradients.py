"""One small gradient of each optimizer, which stands for all: what is not finite spreads to nearly all in a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from nbguard.profiler.checks.parameter_groups import groups_of
from nbguard.profiler.instruments.nonfinite.looked_at import has_gradient

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
