"""Operators that PyTorch composes of others in another way on CUDA than on meta tensors or under a dispatch mode.

Their kernels stand where autograd of meta tensors would, so that callers in C++ meet them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.attention import attention
from nbguard.training.prediction.rules.recurrent import gru_cell, layers, lstm_cell

KEY = "AutogradMeta"


_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def kernels(gpu: Gpu, note_layers: Callable[[int], None], dtype: Callable[[], Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (operator, kernel) as they run on `gpu`.

    Args:
        gpu: the GPU.
        note_layers: is told the bytes that recurrent layers may take beyond those of the trace.
        dtype: returns that of mixed precision, None where it is off.
    """
    for name in _LAYERS:
        for overload in ("input", "data"):
            yield f"{name}.{overload}", partial(layers, name, note_layers, dtype)
    yield "dropout", _dropout
    yield "linear", _linear
    if hasattr(torch.ops.aten, "_fused_rms_norm"):  # since PyTorch 2.8
        yield "rms_norm", _rms_norm
    yield "mish_backward", _mish_backward
    yield "lstm_cell", lstm_cell
    yield "gru_cell", gru_cell
    yield "scaled_dot_product_attention", partial(attention, gpu)


def _dropout(tensor: Any, probability: float, train: bool) -> Any:
    """Return the outputs of CUDA's fused kernel, which saves a mask (aten/src/ATen/native/Dropout.cpp)."""
    if not train or probability == 0 or not tensor.numel():
        return tensor
    if probability < 1:
        return torch.ops.aten.native_dropout(tensor, probability, True)[0]
    return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)


def _linear(tensor: Any, weight: Any, bias: Any = None) -> Any:
    """Return the product with the bias added in place (aten/src/ATen/native/Linear.cpp): under a mode it takes a new one."""
    if bias is not None and tensor.ndim == 2:
        return torch.addmm(bias, tensor, weight.t())
    if bias is not None and tensor.ndim == 3 and tensor.is_contiguous():
        rows = tensor.reshape(-1, tensor.shape[-1])
        return torch.addmm(bias, rows, weight.t()).view(*tensor.shape[:-1], weight.shape[0])
    out = torch.matmul(tensor, weight.t())
    return out if bias is None else out.add_(bias)


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    """CUDA's fused kernel: the output, and one number for each row (`_fused_rms_norm_cuda` in layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, weight: Any, rows: list[int]) -> Any:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        ctx.save_for_backward(tensor, weight, torch.empty(rows, dtype=dtype, device="meta"))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004 - its size is the output's
        tensor, weight, _ = ctx.saved_tensors
        wanted = zip((tensor, weight), ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(each) if is_wanted else None for each, is_wanted in wanted), None


def _rms_norm(tensor: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:  # noqa: ARG001 - the operator's
    rows = [*tensor.shape[: tensor.ndim - len(shape)], *[1] * len(shape)]
    return _RmsNorm.apply(tensor, weight, rows)


def _mish_backward(gradient: Any, _: Any) -> Any:
    """Return the gradient that CUDA's kernel makes at once, where meta tensors take several steps."""
    return torch.empty_like(gradient)
