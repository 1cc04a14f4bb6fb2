"""Scaled dot product attention: the tensors that each backend saves for the backward pass, and its buffers there.

Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu, sdp_utils.cpp for the choice; the
efficient backend's accumulator in mem_eff_attention/kernel_backward.h (blocks of 64 by 64), flash attention's in
flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.rule import Allocator, Replacement, Temporaries, argument, ceil_div, nbytes, up

_aten = torch.ops.aten

# --- Sorting, and gradients of lookups: sorted copies of the indices, and partial sums of segments.


_WITHOUT_SORTING = 3072
"""Most indices of an embedding whose gradient needs no sorting (`embedding_dense_backward_cuda`)."""
_SEGMENT = 10
"""NROWS_PER_THREAD: rows of one partial sum."""
_WARP = 32
_CUB = 18_432
"""Bytes that CUB takes to sort indices besides, as measured: a bound."""
_SMALL_SORT = 4096
"""Greatest length of rows that are sorted in place (`should_use_small_sort`)."""
_BYTES_OF_SORT = 33
"""Bytes for each element of longer rows, as measured: a bound."""


def _embedding_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return sorted indices and partial sums (aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu)."""
    gradient, indices, rows = args[:3]
    count = indices.numel()
    if count <= _WITHOUT_SORTING:
        return ()
    return _sorted_gradient(gradient, count, rows)


def _bag_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the same for bags (`embedding_bag_backward_cuda_sum_avg` in aten/src/ATen/native/cuda/EmbeddingBag.cu)."""
    gradient, indices, rows = args[0], args[1], args[6]
    return (*_sorted_gradient(gradient, indices.numel(), rows), _CUB) if indices.numel() else ()


def _sorted_gradient(gradient: Any, count: int, rows: int) -> tuple[int, ...]:
    segments = min(count, rows) + ceil_div(count, _SEGMENT)
    return *[8 * count] * 4, segments * up(gradient.shape[-1], _WARP) * 4, 8 * count


def _index_put(_: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return sorted indices where values add up (`index_put_with_sort_kernel` in aten/src/ATen/native/cuda/Indexing.cu)."""
    if not argument(args, kwargs, 3, "accumulate", False):
        return ()
    count = prod(torch.broadcast_shapes(*(index.shape for index in args[1] if index is not None)))
    return *(8 * count,) * 6, _CUB


def _sorted(_: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a row, or CUB's memory for long rows: no more than that (aten/src/ATen/native/cuda/Sort.cpp)."""
    tensor = args[0]
    dim = next((each for each in (*args[1:], kwargs.get("dim")) if type(each) is int), -1)
    length = tensor.shape[dim] if tensor.ndim else 1
    return (8 * length,) if length <= _SMALL_SORT else (_BYTES_OF_SORT * tensor.numel(),)


def _median(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the memory for sorting all values (`median_impl` in aten/src/ATen/native/cuda/Sorting.cpp)."""
    return (_BYTES_OF_SORT * args[0].numel(),)


def _masked_scatter(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the place of each value (`launch_masked_scatter_kernel` in aten/src/ATen/native/cuda/IndexKernel.cpp)."""
    return (8 * args[0].numel(), _CUB)


def _masked_scatter_backward(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the chosen values with their places, and zeros for the rest: a bound, as the number of them is not known."""
    return nbytes(args[0]), nbytes(args[0]), 8 * args[0].numel(), _CUB


def _scatter_reduce(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the divisors of sums, and ones to count (`scatter_reduce_two` in TensorAdvancedIndexing.cpp)."""
    tensor, source, reduction = args[0], args[3], args[4]
    return (nbytes(tensor), nbytes(source), tensor.numel()) if reduction == "mean" else ()


TEMPORARIES: dict[Any, Temporaries] = {
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._embedding_bag_backward.default: _bag_backward,
    _aten.sort.default: _sorted,
    _aten.sort.stable: _sorted,
    _aten.median.default: _median,
    _aten.masked_scatter.default: _masked_scatter,
    _aten.masked_scatter_backward.default: _masked_scatter_backward,
    _aten.scatter_reduce.two: _scatter_reduce,
    _aten.scatter_reduce_.two: _scatter_reduce,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
}


_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256


def attention(
    gpu: Gpu,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the output of the backend that CUDA would choose: flash, efficient, or plain matrix products."""
    backends = torch.backends.cuda
    fits = query.ndim == 4 and not enable_gqa and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _LARGEST_HEAD
    aligned = fits and query.shape[-1] % 8 == 0
    if aligned and query.dtype in _HALF and mask is None and gpu.architecture >= (8, 0) and backends.flash_sdp_enabled():
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, False, scale=scale)[0]
    if aligned and query.dtype in (*_HALF, torch.float32) and backends.mem_efficient_sdp_enabled():
        saves = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, saves, dropout, is_causal, scale=scale)[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _heads(like: Any, length: int, width: int) -> Any:
    """Return an output in the layout of the kernels: (batch, length, heads, width), seen as (batch, heads, length, width)."""
    batch, heads = like.shape[:2]
    return torch.empty(batch, length, heads, width, device="meta", dtype=like.dtype).transpose(1, 2)


def _efficient(_: Allocator, __: Any, args: Sequence[Any], ___: Mapping[str, Any]) -> Any:
    """Return the output and, where gradients are wanted, the log of the sums of each row, rounded up to 32 rows."""
    query, value, saves = args[0], args[2], args[4]
    batch, heads, length = query.shape[:3]
    out = _heads(query, length, value.shape[-1])
    sums = torch.empty(batch, heads, up(length, 32) if saves else 0, device="meta", dtype=torch.float32)
    return out, sums, torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)  # seed and offset: host memory


def _efficient_backward(device: Allocator, _: Any, args: Sequence[Any], __: Mapping[str, Any]) -> Any:
    """Return the gradients; the product of gradient and output, and the accumulator in blocks of 64 by 64, are beside them."""
    gradient, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    gradients = (
        _heads(query, length, width),
        _heads(query, key.shape[2], width),
        _heads(query, key.shape[2], value.shape[-1]),
    )
    if query.dtype == torch.float32:
        device.temporaries(nbytes(gradient))
    delta = batch * heads * length * 4
    device.temporaries(delta, delta, batch * heads * ceil_div(length, 64) * ceil_div(width, 64) * (64 * 64 * 4 + 16))
    return (*gradients, None)


def _like(tensor: Any) -> Any:
    """Return an output in the layout of flash attention: that of the input, as far as it is dense."""
    return torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2)


def _flash(device: Allocator, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output and the log of the sums of each row; where keys are divided, the parts' results are beside them."""
    query, key = args[0], args[1]
    batch, heads, length, width = query.shape
    out = _like(query)
    sums = torch.empty(batch, heads, length, device="meta", dtype=torch.float32)
    drops = bool(argument(args, kwargs, 3, "dropout_p", 0.0))
    splits = 1 if drops else _splits(device.gpu, batch * heads, length, key.shape[2], width)
    rows = splits * batch * heads * length * 4 if splits > 1 else 0
    with device.buffers(rows, rows * up(width, 32), 16 if drops else 0):
        seed = torch.empty(2, device="meta", dtype=torch.uint64)
        unused = torch.empty((), device="meta", dtype=torch.uint64)
        return out, sums, None, None, length, key.shape[2], seed, unused, torch.empty(0, device="meta", dtype=query.dtype)


def _splits(gpu: Gpu, heads: int, length: int, others: int, width: int) -> int:
    """Return into how many parts the keys are divided where queries alone do not fill the GPU (`num_splits_heuristic`).

    Args:
        gpu: has so many multiprocessors.
        heads: of all items of a batch.
        length: number of queries.
        others: number of keys.
        width: of a head.
    """
    blocks = heads * ceil_div(length, 64)
    of_keys = ceil_div(others, 256 if width <= 64 else 128 if width <= 128 else 64)
    places = 2 * gpu.multiprocessors
    if blocks >= 0.8 * places:
        return 1
    counts = range(1, min(128, places, of_keys) + 1)
    usable = [n for n in counts if n == 1 or ceil_div(of_keys, n) != ceil_div(of_keys, n - 1)]
    full = {n: blocks * n / places / ceil_div(blocks * n, places) for n in usable}
    return next(n for n in usable if full[n] >= 0.85 * max(full.values()))


def _flash_backward(device: Allocator, _: Any, args: Sequence[Any], __: Mapping[str, Any]) -> Any:
    """Return the gradients; sums of rows, and the query's gradient in float32, are beside them, rounded up to 128 rows."""
    gradient, query, key, value, out = args[:5]
    batch, heads, length, width = query.shape
    copies = [nbytes(each) for each in (gradient, out) if not each.transpose(1, 2).is_contiguous()]
    rows = up(length, 128)
    with device.buffers(*copies):
        gradients = _like(query), _like(key), _like(value)
        device.temporaries(batch * heads * rows * 4, batch * rows * heads * up(width, 32) * 4)
    return gradients


REPLACED: dict[Any, Replacement] = {
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}
