"""Scaled dot product attention: the tensors that each backend saves for the backward pass, and its buffers there.

Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu, sdp_utils.cpp for the choice; the
efficient backend's accumulator in mem_eff_attention/kernel_backward.h (blocks of 64 by 64), flash attention's in
flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbguard.memory.allocator.model.settings import parse_version
from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.rule import Allocator, Replacement, argument, ceil_div, nbytes, up

_aten = torch.ops.aten

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


_SEED_ON_DEVICE = parse_version(str(torch.__version__)) >= (2, 14)
"""Since 2.14 the efficient backend keeps seed and offset on the device where nothing is dropped, before in host memory."""


def _efficient(_: Allocator, __: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the output and, where gradients are wanted, the log of the sums of each row, rounded up to 32 rows."""
    query, value, saves = args[0], args[2], args[4]
    batch, heads, length = query.shape[:3]
    drops = bool(argument(args, kwargs, 5, "dropout_p", 0.0))
    place = "meta" if _SEED_ON_DEVICE and not drops else "cpu"
    seed, offset = (torch.zeros((), device=place, dtype=torch.long) for _ in range(2))
    out = _heads(query, length, value.shape[-1])
    sums = torch.empty(batch, heads, up(length, 32) if saves else 0, device="meta", dtype=torch.float32)
    return out, sums, seed, offset


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
