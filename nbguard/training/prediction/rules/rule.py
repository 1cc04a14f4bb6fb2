"""The two kinds of rules, and sizes that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from nbguard.training.prediction.hardware import Gpu

Temporaries = Callable[[Gpu, Sequence[Any], Mapping[str, Any]], "tuple[int, ...]"]
"""(gpu, args, kwargs) of an operator → the bytes of each buffer that lives beside its outputs until it returns."""


class Allocator(Protocol):
    """The device, as a replacement sees it."""

    gpu: Gpu

    def temporaries(self, *sizes: int) -> None:
        """Allocate buffers of these bytes one after the other, then free them."""

    def buffers(self, *sizes: int) -> AbstractContextManager[None]:
        """Return a context that buffers of these bytes live in."""


Replacement = Callable[[Allocator, Any, Sequence[Any], Mapping[str, Any]], Any]
"""(device, operator, args, kwargs) → the outputs; `NotImplemented`: as the operator itself does it."""


def nbytes(tensor: Any) -> int:
    """Return the bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def up(number: int, step: int) -> int:
    """Return `number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def ceil_div(number: int, by: int) -> int:
    """Return `number / by`, rounded up."""
    return -(-number // by)


def power_below(number: int) -> int:
    """Return the largest power of two that is not above `number`, 1 at least."""
    return 1 << (max(1, number).bit_length() - 1)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    """Return an operator's argument, given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)
