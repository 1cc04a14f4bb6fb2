"""The tensors of a step that are looked at: a loss as one number, gradients of a kind together."""

from __future__ import annotations

from typing import Any


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
