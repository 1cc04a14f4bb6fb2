"""The facts of an operation that made a value that is not finite, with the numbers that it got at that place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.training.profiler.analysis.health.operations import FailedOperation
from nbguard.training.profiler.nonfinite.operations.operation_trace import module_name
from nbguard.training.profiler.nonfinite.operations.replay import FoundOperation

_ITEMS = 4
"""Places in a batch that are named."""


def operation_of(found: FoundOperation, models: list[Any]) -> FailedOperation:
    """Return the facts of an operation, from the values that it was computed with again."""
    call = found.call
    if call is None:
        raise ValueError("no operation made it")
    gradient = found.gradient[0] if found.gradient else None
    is_turned = call.function.__name__ in ("__rtruediv__", "__rpow__", "__rdiv__")
    operation = facts_of(call.name, found.values, found.made, is_turned=is_turned, gradient=gradient)
    module = call.line.module() if call.line.module is not None else None
    named = None if module is None else module_name(models, module)
    return replace(
        operation,
        line=call.line.words,
        module=named[0] if named else "",
        module_type=named[1] if named else "",
        is_backward=found.gradient is not None,
        has_only_minus_infinity=found.gradient is None and operation.has_only_minus_infinity,
    )


def facts_of(name: str, operands: Any, results: list[Any], *, is_turned: bool = False, gradient: Any = None) -> FailedOperation:
    """Return the facts of an operation.

    `results`: of the operation, or the gradients of its inputs. `is_turned`: the first operand stands last, as in `1 / x`.
    `gradient`: of its result.
    """
    leaves = torch.utils._pytree.tree_leaves(operands)
    tensors = [leaf for leaf in leaves if torch.Tensor in mro_of(type(leaf))]
    numbers = [leaf for leaf in leaves if type(leaf) in (int, float)]
    made = next((tensor for tensor in results if not _all_finite(tensor)), results[0])
    is_broken = ~torch.isfinite(made.detach())
    place = tuple(is_broken.nonzero()[0].tolist()) if made.numel() and bool(is_broken.any()) else ()
    got = [_at(tensor, made, place) for tensor in tensors]
    value, other = next(iter(got), None), next(iter(got[1:]), None)
    if other is None and numbers and len(tensors) == 1:
        other = float(numbers[0])
        value, other = (other, value) if is_turned else (value, other)
    return FailedOperation(
        name=name,
        result="NaN" if bool(made.isnan().any()) else "infinite",
        dtype=str(_narrowest([*tensors, made])).removeprefix("torch."),
        value=value,
        other=other,
        largest=max((size for tensor in tensors if (size := _largest(tensor)) is not None), default=None),
        is_empty=any(tensor.numel() == 0 for tensor in tensors),
        has_only_minus_infinity=any(not _all_finite(tensor) for tensor in tensors),
        is_masked=_at(gradient, made, place) == 0.0,
    )


def items_of(tensor: Any) -> tuple[int, ...]:
    """Return the first places in a batch whose values are not finite."""
    if not tensor.dim():
        return ()
    is_broken = ~torch.isfinite(tensor.detach()).reshape(tensor.shape[0], -1).all(1)
    return tuple(is_broken.nonzero()[:_ITEMS, 0].tolist())


def _at(tensor: Any, made: Any, place: tuple[int, ...]) -> float | None:
    """Return the value of a tensor where `made` has one at `place`, if one goes with the other; the only one of another."""
    if tensor is None or not tensor.numel() or tensor.is_complex():
        return None
    tensor = tensor.detach()
    if tensor.numel() == 1:
        return float(tensor.reshape(()))
    if tensor.shape == made.shape:
        return float(tensor[place])
    try:
        return float(tensor.expand(made.shape)[place])
    except RuntimeError:
        return None


def _largest(tensor: Any) -> float | None:
    if not tensor.numel() or not tensor.is_floating_point():
        return None
    size = float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().amax())
    return size if math.isfinite(size) else None


def _narrowest(tensors: list[Any]) -> Any:
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return next((dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)), dtypes[-1] if dtypes else "")


def _all_finite(tensor: Any) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())
