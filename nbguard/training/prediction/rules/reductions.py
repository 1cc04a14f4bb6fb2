"""Split reductions: a long reduction is shared by several blocks of threads, which meet in a buffer in global memory.

Source: `setReduceConfig` and `gpu_reduce_kernel` in aten/src/ATen/native/cuda/Reduce.cuh. The buffer has one accumulator
(`arg_t`) for each output and block of threads, and as many more as there are threads beside each other where the reduced
dimension is not the fastest; semaphores take four bytes for each column of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.rule import Temporaries, argument, ceil_div, nbytes, power_below

_THREADS = 512
"""MAX_NUM_THREADS of a reduction."""
_VALUES = (16, 256)
"""Inputs of one thread: at least so many where a reduction is split, at most so many where it is not."""
_WARP = 32

Span = tuple[int, int]
"""(stride, size) of a dimension."""


def buffers(gpu: Gpu, tensor: Any, dims: Sequence[int] | None, accumulator: int) -> tuple[int, ...]:
    """Return the bytes of the buffer and the semaphores of a reduction of `tensor` over `dims` (all if None)."""
    if not tensor.numel() or not tensor.ndim:
        return ()
    reduced_dims = {dim % tensor.ndim for dim in (dims or range(tensor.ndim))}
    spans = [
        (tensor.stride(dim), tensor.shape[dim], dim in reduced_dims) for dim in range(tensor.ndim) if tensor.shape[dim] != 1
    ]
    reduced = _coalesced((stride, size) for stride, size, is_reduced in spans if is_reduced)
    kept = _coalesced((stride, size) for stride, size, is_reduced in spans if not is_reduced)
    if not reduced:
        return ()
    outputs = prod(size for _, size in kept)
    inputs = tensor.numel() // outputs
    is_fast = not kept or reduced[0][0] < kept[0][0]
    return _split(gpu, reduced, kept, inputs, outputs, is_fast, accumulator)


def _coalesced(spans: Any) -> list[Span]:
    """Return dimensions by stride, neighbours that lie behind each other joined."""
    joined: list[Span] = []
    for stride, size in sorted(spans):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0], joined[-1][1] * size
        else:
            joined.append((stride, size))
    return joined


def _split(
    gpu: Gpu, reduced: list[Span], kept: list[Span], inputs: int, outputs: int, is_fast: bool, accumulator: int
) -> tuple[int, ...]:
    first, second = (inputs, outputs) if is_fast else (outputs, inputs)
    vector = 1  # outputs that one thread makes at once
    if (reduced if is_fast else kept)[0][0] == 1:
        if not is_fast:
            vector = _output_vector(reduced, kept)
            first //= vector
        elif first >= 128 and len(reduced) + len(kept) == 1:
            first //= 4
    most = _THREADS // vector
    width = min(power_below(first), most, _WARP)
    height = min(power_below(second), most // width)
    width = min(power_below(first), most // height)
    step_in, step_out = (width, 1) if is_fast else (1, width)
    is_high = ceil_div(inputs, step_in) >= min(height * _VALUES[0], _VALUES[1])
    if is_high:
        step_in *= height
    else:
        step_out *= height
    target = gpu.multiprocessors * (gpu.threads // (width * height))
    grid, values = ceil_div(outputs // vector, step_out), ceil_div(inputs, step_in)
    if not is_high or values < _VALUES[1] or grid > target:
        return ()
    blocks = max(min(ceil_div(target, grid), ceil_div(values, _VALUES[0])), ceil_div(values, _VALUES[1]))
    if blocks <= 1:
        return ()
    return accumulator * outputs * blocks * (1 if is_fast else width * vector), 4 * grid


def _output_vector(reduced: list[Span], kept: list[Span]) -> int:
    vector = 4
    for number in (kept[0][1], *(stride for stride, _ in chain(reduced, kept[1:]))):
        while number % vector:
            vector //= 2
    return vector


def _sum(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the buffer of float32 or int64 accumulators, after a copy of integers as int64 (`sum_kernel_cuda`)."""
    tensor, dims = args[0], argument(args, kwargs, 1, "dim")
    dims = dims if isinstance(dims, (list, tuple)) else None
    if tensor.dtype.is_floating_point:
        return buffers(gpu, tensor, dims, 8 if tensor.dtype == torch.float64 else 4)
    copy = () if tensor.dtype == torch.int64 else (8 * tensor.numel(),)  # `make_reduction` casts to int64 first
    return copy + buffers(gpu, tensor, dims, 8)


def _count(gpu: Gpu, args: Sequence[Any], _: Mapping[str, Any]) -> tuple[int, ...]:
    """Return whether each value is none, and its sum (`count_nonzero_cuda` in aten/src/ATen/native/TensorCompare.cpp)."""
    tensor = args[0]
    return (0 if tensor.dtype == torch.bool else tensor.numel(), 8 * tensor.numel(), *buffers(gpu, tensor, None, 8))


def _norm(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the buffer of float32 accumulators, float64 for such a tensor (`norm_launch_kernel` in ReduceNormKernel.cu)."""
    return buffers(gpu, args[0], argument(args, kwargs, 2, "dim"), 8 if args[0].dtype == torch.float64 else 4)


def _variance(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the buffer of accumulators of 16 bytes: mean, sum of squares, counts (`WelfordData` in SharedReduceOps.h)."""
    dims = argument(args, kwargs, 1, "dim")
    return buffers(gpu, args[0], dims if isinstance(dims, (list, tuple)) else None, 16)


def _extreme(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the buffer of accumulators of the tensor's own type (ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu)."""
    dims = argument(args, kwargs, 1, "dim", ())
    return buffers(gpu, args[0], dims if isinstance(dims, (list, tuple)) else None, args[0].element_size())


def _place(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the buffer of accumulators of 16 bytes, a value and its index (ReduceArgMaxKernel.cu, ReduceArgMinKernel.cu)."""
    dim = argument(args, kwargs, 1, "dim")
    return buffers(gpu, args[0], [dim] if isinstance(dim, int) else None, 16)


def _truth(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the buffer of accumulators of one byte (ReduceLogicKernel.cu)."""
    return buffers(gpu, args[0], [argument(args, kwargs, 1, "dim")], 1)


def _logarithm(gpu: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the greatest values and the exponents (`logsumexp_out_impl` in aten/src/ATen/native/ReduceOps.cpp)."""
    dims = argument(args, kwargs, 1, "dim", ())
    outputs = args[0].numel() // prod(args[0].shape[dim] for dim in dims)
    return outputs * args[0].element_size(), nbytes(args[0]), *buffers(gpu, args[0], dims, 4)


_aten = torch.ops.aten
TEMPORARIES: dict[Any, Temporaries] = {
    _aten.sum.dim_IntList: _sum,
    _aten.sum.default: _sum,
    _aten.mean.dim: _sum,
    _aten.mean.default: _sum,
    _aten.count_nonzero.default: _count,
    _aten.linalg_vector_norm.default: _norm,
    _aten.norm.ScalarOpt_dim: _norm,
    _aten.var.correction: _variance,
    _aten.var_mean.correction: _variance,
    _aten.std.correction: _variance,
    _aten.amax.default: _extreme,
    _aten.amin.default: _extreme,
    _aten.max.default: _extreme,
    _aten.min.default: _extreme,
    _aten.max.dim: _place,
    _aten.min.dim: _place,
    _aten.argmax.default: _place,
    _aten.argmin.default: _place,
    _aten.all.dim: _truth,
    _aten.any.dim: _truth,
    _aten.logsumexp.default: _logarithm,
}
