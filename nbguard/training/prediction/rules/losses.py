"""Losses that are computed element by element before they are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.reductions import buffers
from nbguard.training.prediction.rules.rule import Allocator, Replacement, Temporaries, argument, nbytes

_aten = torch.ops.aten


def _cross_entropy_of_bits(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return two tensors of the input's size (`binary_cross_entropy_with_logits` in aten/src/ATen/native/Loss.cpp)."""
    return nbytes(args[0]), nbytes(args[0])


def _reduced_in_place(device: Allocator, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the loss, summed up as any reduction, in a storage of the input's size, which lives as long as the loss.

    Source: `mse_loss_out` and `smooth_l1_loss_out` in aten/src/ATen/native/Loss.cpp: the output is made as large as the
    input, then resized, and no resizing to fewer bytes gives memory back.
    """
    if not argument(args, kwargs, 2, "reduction", 1):
        return NotImplemented
    out = torch.empty_like(args[0])
    device.temporaries(nbytes(args[0]), *buffers(device.gpu, args[0], None, 4))
    return out.resize_(())


def _bits(device: Allocator, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the loss in a storage of the input's size, too; its mean or sum is made beside it.

    Source: `binary_cross_entropy_cuda` in aten/src/ATen/native/cuda/Loss.cu.
    """
    if not argument(args, kwargs, 3, "reduction", 1):
        return NotImplemented
    out = torch.empty_like(args[0])
    with device.buffers(args[0].element_size()):
        device.temporaries(*buffers(device.gpu, args[0], None, 4))
        return out.resize_(())


def _huber(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the losses of the elements, and the memory of their sum (`huber_loss` in aten/src/ATen/native/Loss.cpp)."""
    is_reduced = argument(args, kwargs, 2, "reduction", 1)
    return (nbytes(args[0]), *buffers(gpu, args[0], None, 4)) if is_reduced else ()


REPLACED: dict[Any, Replacement] = {
    _aten.mse_loss.default: _reduced_in_place,
    _aten.smooth_l1_loss.default: _reduced_in_place,
    _aten.binary_cross_entropy.default: _bits,
}
TEMPORARIES: dict[Any, Temporaries] = {
    _aten.binary_cross_entropy_with_logits.default: _cross_entropy_of_bits,
    _aten.huber_loss.default: _huber,
}
