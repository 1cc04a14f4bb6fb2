"""Dropout, norms, softmax, shifts and sliding windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.rule import Allocator, Replacement, Temporaries, argument, ceil_div, nbytes, power_below

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def _dropout(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return output and mask; the mask is bool and comes first (`dropout_cuda` in aten/src/ATen/native/cuda/Dropout.cu)."""
    mask = torch.empty_like(args[0], dtype=torch.bool)
    return torch.empty_like(args[0]), mask


def _dropout_backward(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return the gradient of the input (`native_dropout_backward_cuda` in aten/src/ATen/native/cuda/Dropout.cu)."""
    return torch.empty_like(args[0])


def _layer_norm(device: Allocator, _: Any, args: Sequence[Any], __: Mapping[str, Any]) -> Any:
    """Return a contiguous output and the statistics (`layer_norm_cuda` in aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""
    tensor, shape = args[:2]
    kept = [*tensor.shape[: tensor.ndim - len(shape)], *[1] * len(shape)]
    dtype = torch.float32 if tensor.dtype in _HALF else tensor.dtype
    with device.buffers(0 if tensor.is_contiguous() else nbytes(tensor)):
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return out, torch.empty(kept, dtype=dtype, device="meta"), torch.empty(kept, dtype=dtype, device="meta")


def _layer_norm_backward(device: Allocator, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the gradients; a contiguous copy of the input is there before them (`layer_norm_backward_cuda`)."""
    with device.buffers(0 if args[1].is_contiguous() else nbytes(args[1])):
        return operator(*args, **kwargs)


def _group_norm(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return scale and shift of each item's channels (`GroupNormKernelImplInternal` in group_norm_kernel.cu)."""
    tensor, weight, batch, channels, groups = args[0], args[1], args[3], args[4], args[6]
    of_groups = (4 * batch * groups,) * 2 if tensor.dtype in _HALF else ()
    return of_groups if weight is None else (*(4 * batch * channels,) * 2, *of_groups)


def _group_norm_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return sums by channel, and factors by channel and group (`GroupNormBackwardKernelImplInternal`)."""
    batch, channels, groups = args[5], args[6], args[8]
    return *(4 * batch * channels,) * 3, *(4 * batch * groups,) * 2


_TILE = 32
_BLOCK = 512
_VALUES_OF_THREAD = 16
_MOST_BLOCKS = 128
"""OPTIMAL_TILE_W, MAX_BLOCK_SIZE, ELEMENTS_PER_THREAD and MAX_H_BLOCK of Normalization.cuh."""


def _batch_norm_of_rows(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the statistics of each block of rows, and semaphores (`flexible_launch_configs` in Normalization.cuh)."""
    tensor = args[0]
    if tensor.ndim != 2 or not args[5]:
        return ()
    rows, width = tensor.shape
    across = min(power_below(width), _TILE)
    down = min(power_below(ceil_div(rows, _VALUES_OF_THREAD)), _BLOCK // across)
    across = min(power_below(width), _BLOCK // down)
    blocks = min(ceil_div(rows, down * _VALUES_OF_THREAD), _MOST_BLOCKS)
    return (4 * 4 * width * blocks, 4 * ceil_div(width, across)) if blocks > 1 else ()


def _batch_norm_of_rows_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the two sums of each channel (`batch_norm_backward_reduce_cuda_channels_last_template`)."""
    return (4 * args[1].shape[1],) * 2 if args[1].ndim == 2 else ()


def _batch_norm_backward(device: Allocator, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the gradients; a copy of a gradient that is a part of another tensor is there before them, as after `torch.cat`.

    Source: `cudnn_batch_norm_backward` in aten/src/ATen/native/cudnn/BatchNorm.cpp; bfloat16 is not cuDNN's.
    """
    gradient, tensor = args[:2]
    is_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    memory_format = torch.channels_last if is_last else torch.contiguous_format
    is_copied = tensor.ndim > 2 and tensor.dtype != torch.bfloat16 and not gradient.is_contiguous(memory_format=memory_format)
    with device.buffers(nbytes(gradient) if is_copied else 0):
        return operator(*args, **kwargs)


def _roll(device: Allocator, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output; each dimension is shifted by itself (`roll_common` in TensorTransformations.h)."""
    tensor, dims = args[0], argument(args, kwargs, 2, "dims", ())
    copy = 0 if tensor.is_contiguous() else nbytes(tensor)
    with device.buffers(copy, *(nbytes(tensor),) * (len(dims) - 1)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _windows(device: Allocator, operator: Any, args: Sequence[Any], _: Mapping[str, Any]) -> Any:
    """Return the columns of sliding windows, or the picture of their sum, in a storage that begins with the input's size.

    It is resized: a larger result takes a second storage next to it, a smaller one keeps the first as long as it lives.
    Source: `im2col_cuda` and `col2im_cuda` in aten/src/ATen/native/cuda/Im2Col.cu and Col2Im.cu.
    """
    tensor = args[0]
    with _disable_current_modes():
        shape = operator(*args).shape
    copy = 0 if tensor.is_contiguous() else nbytes(tensor)
    if shape.numel() > tensor.numel():
        with device.buffers(nbytes(tensor), copy):
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    device.temporaries(copy)
    return out.resize_(shape)


def _softmax(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the contiguous copy of an input that is not (`host_softmax` in aten/src/ATen/native/cuda/SoftMax.cu)."""
    return () if args[0].is_contiguous() else (nbytes(args[0]),)


def _softmax_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the product of gradient and output (`softmax_backward_cuda_out` in aten/src/ATen/native/cuda/SoftMax.cu)."""
    return (nbytes(args[0]),)


def _log_sigmoid(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return the output, and a buffer that only the host's kernel fills (`log_sigmoid_forward_out_cuda`)."""
    return torch.empty_like(args[0]), torch.empty(0, dtype=args[0].dtype, device="meta")


def _distances_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the gradient of each pair of points (`_cdist_backward` in aten/src/ATen/native/cuda/DistanceKernel.cu)."""
    first, second = args[1], args[2]
    return (nbytes(first) * second.shape[-2],)


def _distances_within_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the same for one set of points (`_pdist_backward` there)."""
    return (nbytes(args[1]) * (args[1].shape[0] - 1),)


def _distances(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return both sets of points with norms and ones beside them (`_euclidean_dist` in Distance.cpp)."""
    return tuple((nbytes(each) // each.shape[-1]) * (each.shape[-1] + 2) for each in args[:2])


REPLACED: dict[Any, Replacement] = {
    _aten.native_dropout.default: _dropout,
    _aten.native_dropout_backward.default: _dropout_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.roll.default: _roll,
    _aten.im2col.default: _windows,
    _aten.col2im.default: _windows,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
}
TEMPORARIES: dict[Any, Temporaries] = {
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._euclidean_dist.default: _distances,
    _aten._cdist_backward.default: _distances_backward,
    _aten._pdist_backward.default: _distances_within_backward,
    _aten.native_batch_norm.default: _batch_norm_of_rows,
    _aten.native_batch_norm_backward.default: _batch_norm_of_rows_backward,
}
