"""Convolutions by cuDNN: their memory format, copies of what is in another one, and the sum that is the bias's gradient.

Source: `_convolution` and `convolution_backward` in aten/src/ATen/native/Convolution.cpp, ConvShared.cpp in its folder cudnn,
`cudnn_conv_suggest_memory_format` in ConvUtils.h. Meta tensors know one format only. Workspaces are cuDNN's and not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbguard.prediction.rules.reductions import buffers
from nbguard.prediction.rules.rule import Allocator, Replacement, nbytes

_aten = torch.ops.aten
_LAST = torch.channels_last


def _is_last(*tensors: Any) -> bool:
    """Say whether cuDNN works in channels last: it does where one of its tensors is in that format."""
    return tensors[0].ndim == 4 and any(
        each.is_contiguous(memory_format=_LAST) and not each.is_contiguous() for each in tensors
    )


def _copies(*tensors: Any) -> tuple[int, ...]:
    """Return the bytes of copies in channels last of those that are not."""
    return tuple(nbytes(each) for each in tensors if not each.is_contiguous(memory_format=_LAST))


def _empty(shape: Sequence[int], like: Any) -> Any:
    return torch.empty(shape, dtype=like.dtype, device="meta", memory_format=_LAST)


def _forward(device: Allocator, operator: Any, args: Sequence[Any], _: Mapping[str, Any]) -> Any:
    tensor, weight = args[:2]
    if not _is_last(tensor, weight):
        return NotImplemented
    with _disable_current_modes():
        shape = operator(*args).shape
    with device.buffers(*_copies(tensor, weight)):
        return _empty(shape, tensor)


def _backward(device: Allocator, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    gradient, tensor, weight, wanted = *args[:3], args[10]
    if _is_last(tensor, weight):
        with device.buffers(*_copies(tensor, gradient)):
            with device.buffers(*_copies(weight)):
                of_input = _empty(tensor.shape, tensor) if wanted[0] else None
            of_weight = _empty(weight.shape, weight) if wanted[1] else None
        of_bias = torch.empty(args[3], dtype=gradient.dtype, device="meta") if wanted[2] else None
    else:
        of_input, of_weight, of_bias = operator(*args, **kwargs)
    if wanted[2]:
        device.temporaries(*buffers(device.gpu, gradient, [dim for dim in range(gradient.ndim) if dim != 1], 4))
    return of_input, of_weight, of_bias


REPLACED: dict[Any, Replacement] = {
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
}
