"""Batches as shapes, that make larger and smaller ones without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbguard.errors import UnpredictableError

FULL = 3
"""Full training batches of a trace: the optimizer's state is there from the first on, later ones repeat the second."""
STEPS = 2
"""Steps of a trace where gradients of several batches are added up."""
MOST = 64
"""Full training batches of a trace, however many of them make a step: a fit that adds up more is not followed to its steps."""

Item = TypeVar("Item")


class Progress(Protocol):
    """How far a trace has come."""

    @property
    def steps(self) -> int:
        """Return the steps of optimizers until now."""

    @property
    def passes(self) -> int:
        """Return the backward passes until now."""


def enough(items: Iterable[Item], progress: Progress, *, has_optimizer: bool = True, few: int = FULL) -> Iterator[Item]:
    """Yield batches until a loop over them has nothing new to show: a few, and as many as make two steps of the optimizer.

    Args:
        items: stand-ins for the batches.
        progress: of the trace, which is read between the batches.
        has_optimizer: its steps are waited for where there are backward passes.
        few: batches that show all else.
    """
    steps, passes = progress.steps, progress.passes
    for number, item in enumerate(items):
        is_waiting = has_optimizer and progress.passes > passes and progress.steps < steps + STEPS
        if number >= (MOST if is_waiting else few):
            return
        yield item


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor of a batch: enough to make one like it without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    kind: type[Any]  # the tensor's class, such as fastai's TensorImage

    @classmethod
    def of(cls, tensor: Any) -> TensorShape:
        """Return the shape of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, type(tensor))

    def cut(self, whole: int, items: int) -> TensorShape:
        """Return the shape of a batch of so many `items` instead of `whole`; tensors without a dimension of that size stay."""
        if not self.shape or self.shape[0] != whole:
            return self
        return TensorShape((items, *self.shape[1:]), self.stride, self.dtype, self.kind)

    def make(self) -> Any:
        """Return a new tensor of that shape on the meta device."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return tensor if self.kind is torch.Tensor else tensor.as_subclass(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShapes:
    """A batch in shapes, that makes larger and smaller ones."""

    shapes: Any  # `TensorShape` where the batch has a tensor
    items: int  # in it
    size: int  # items of a batch of the fit, unless another size is asked for
    is_on_host: bool = True  # it was given on the host

    @classmethod
    def of(cls, batch: Any, size: int | None = None) -> BatchShapes:
        """Return the shapes of `batch`.

        Args:
            batch: tensors in tuples, lists and dictionaries.
            size: items of a batch of the fit; None for its own.

        Raises:
            UnpredictableError: it has no tensor.
        """
        shapes = _shapes(batch)
        items = _items(shapes)
        return cls(shapes=shapes, items=items, size=size or items, is_on_host=_is_on_host(batch))

    def cut(self, items: int) -> Any:
        """Return the shapes of a batch of so many items."""
        return _each(self.shapes, lambda shape: shape.cut(self.items, items))


def made(shapes: Any) -> Any:
    """Return a batch of tensors without data from their shapes."""
    return _each(shapes, TensorShape.make)


def made_on_host(shapes: Any) -> Any:
    """Return the same as tensors that stand for the host's: no mode sees them before they are moved or used."""

    def make(shape: TensorShape) -> Any:
        tensor = shape.make()
        tensor._is_on_host = True
        return tensor

    with _disable_current_modes():
        return _each(shapes, make)


def moved(tensor: Any) -> Any:
    """Return a tensor that stands for one of the host's on the device: a new one, as a move makes; others as they are."""
    if not getattr(tensor, "_is_on_host", False):
        return tensor
    return TensorShape.of(tensor).make()


def sizes(count: int, size: int, *, is_last_dropped: bool, full: int = FULL) -> tuple[int, ...]:
    """Return the items of the batches to trace: so many full ones at most, and the last one if it is smaller."""
    last = count % size
    return (size,) * min(count // size, full) + ((last,) if last and not is_last_dropped else ())


def trained_sizes(count: int, size: int, *, is_last_dropped: bool, full: int = FULL) -> tuple[int, ...]:
    """Return the same of a loader that is trained on.

    Raises:
        UnpredictableError: it has no batch.
    """
    found = sizes(count, size, is_last_dropped=is_last_dropped, full=full)
    if not found:
        raise UnpredictableError(
            f"the fit would train on no batch because the training set has {count} items, fewer than the {size} of a batch, "
            f"and its loader drops a batch that is not full. Take {count} items or fewer"
            if count
            else "the fit would train on no batch because the training set is empty"
        )
    return found


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorShape.of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_shapes(each) for each in value) if type(value) in (tuple, list) else tuple(map(_shapes, value))
    if isinstance(value, Mapping):
        return {name: _shapes(each) for name, each in value.items()}
    return value


def _is_on_host(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.device.type == "cpu")
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return all(map(_is_on_host, parts))


def _each(value: Any, act: Callable[[TensorShape], Any]) -> Any:
    if isinstance(value, TensorShape):
        return act(value)
    if type(value) in (tuple, list):
        return type(value)(_each(part, act) for part in value)
    if type(value) is dict:
        return {name: _each(part, act) for name, part in value.items()}
    return value


def _items(value: Any) -> int:
    """Return the items of a batch: the first dimension of its first tensor."""
    lengths: list[int] = []
    _each(value, lambda shape: lengths.append(shape.shape[0] if shape.shape else 1))
    if not lengths:
        raise UnpredictableError("the batch has no tensor")
    return lengths[0]
