"""Indices: sorting, gradients of lookups, permutations and draws, which take sorted copies of the indices and partial sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.rule import Temporaries, argument, ceil_div, nbytes, up

_aten = torch.ops.aten

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


_BYTES_OF_PERMUTATION = 41
"""Bytes for each element of a permutation, as measured: a bound."""
_BLOCKS = 4096
"""Bytes of the smallest buffers together, rounded up as the allocator does: a bound."""
_COPIES_OF_DRAWS = 4
"""Copies of the probabilities that draws with replacement take: a bound."""


def _permutation(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return keys and values that are sorted (`randperm_out_cuda` in aten/src/ATen/native/cuda/Randperm.cpp)."""
    return (_BYTES_OF_PERMUTATION * args[0] + _BLOCKS,)


def _draws(_: Gpu, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the noise that divides the probabilities, or their sums (`multinomial` in native/Distributions.cpp)."""
    copies = _COPIES_OF_DRAWS if argument(args, kwargs, 2, "replacement", False) else 1
    return nbytes(args[0]) * copies, 16 * args[0].numel() // max(1, args[0].shape[-1]) * args[1] + _BLOCKS


def _coin(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the probabilities as numbers of four bytes (`bernoulli_tensor_cuda_kernel` in native/cuda)."""
    return () if args[0].element_size() == 4 else (4 * args[0].numel(),)


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
    _aten.randperm.default: _permutation,
    _aten.randperm.generator: _permutation,
    _aten.multinomial.default: _draws,
    _aten.bernoulli.default: _coin,
}
