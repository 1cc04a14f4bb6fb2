"""Dropout, layer norm and softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbguard.prediction.hardware import Gpu
from nbguard.prediction.rules.rule import Allocator, Replacement, Temporaries, nbytes

_aten = torch.ops.aten


def _dropout(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return output and mask; the mask is bool and comes first (`dropout_cuda` in aten/src/ATen/native/cuda/Dropout.cu)."""
    mask = torch.empty_like(args[0], dtype=torch.bool)
    return torch.empty_like(args[0]), mask


def _dropout_backward(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    return torch.empty_like(args[0])


def _layer_norm(device: Allocator, _: Any, args: Sequence[Any], __: Mapping[str, Any]) -> Any:
    """Return a contiguous output and the statistics (`layer_norm_cuda` in aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""
    tensor, shape = args[:2]
    if not tensor.is_contiguous():
        device.temporaries(nbytes(tensor))
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    kept = [*tensor.shape[: tensor.ndim - len(shape)], *[1] * len(shape)]
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return out, torch.empty(kept, dtype=dtype, device="meta"), torch.empty(kept, dtype=dtype, device="meta")


def _softmax_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the product of gradient and output (`softmax_backward_cuda_out` in aten/src/ATen/native/cuda/SoftMax.cu)."""
    return (nbytes(args[0]),)


REPLACED: dict[Any, Replacement] = {
    _aten.native_dropout.default: _dropout,
    _aten.native_dropout_backward.default: _dropout_backward,
    _aten.native_layer_norm.default: _layer_norm,
}
TEMPORARIES: dict[Any, Temporaries] = {_aten._softmax_backward_data.default: _softmax_backward}
