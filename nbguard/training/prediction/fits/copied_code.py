"""A copy of training code that the user wrote, a step or a loop, with the models and optimizers that it refers to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from nbguard.training.prediction.fits.copies import in_order_of_moving


@dataclass(kw_only=True)
class CopiedCode:
    """Code that runs without data, and the objects it refers to."""

    namespace: dict[str, Any]  # the copy's globals
    names: tuple[str, ...]  # of its models, then of its optimizers
    models: tuple[Any, ...]  # copied modules that it refers to
    optimizers: tuple[Any, ...]  # copied optimizers that it refers to

    @property
    def has_optimizer(self) -> bool:
        """Return whether the code refers to an optimizer of PyTorch's."""
        return bool(self.optimizers)

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors of the models, then the optimizers' state."""
        yield from chain.from_iterable(map(in_order_of_moving, self.models))
        for optimizer in self.optimizers:
            yield from state_of(optimizer)

    def change(self, code: str) -> None:
        """Run lines that change the models and optimizers, by their names, where the code finds them."""
        for name, value in zip(self.names, (*self.models, *self.optimizers), strict=True):
            self.namespace.setdefault(name, value)
        exec(code, self.namespace)  # noqa: S102 - our own lines, the same that are shown


def state_of(optimizer: Any) -> Iterable[Any]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
