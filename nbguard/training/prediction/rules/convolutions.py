"""Convolutions by cuDNN: their memory format, copies of tensors in another one, and the sum that is the bias's gradient.

Source: `_convolution` and `convolution_backward` in aten/src/ATen/native/Convolution.cpp, ConvShared.cpp in its folder cudnn,
`cudnn_conv_suggest_memory_format` in ConvUtils.h. Meta tensors know one format only. Workspaces are cuDNN's and not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nbguard.training.prediction.rules.reductions import buffers
from nbguard.training.prediction.rules.rule import Allocator, Replacement, nbytes

_aten = torch.ops.aten
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _format(*tensors: Any) -> Any:
    """Return cuDNN's memory format: channels last where one of its tensors is in that (`cudnn_conv_suggest_memory_format`)."""
    last = _LAST.get(tensors[0].ndim)
    is_last = last and any(each.is_contiguous(memory_format=last) and not each.is_contiguous() for each in tensors)
    return last if is_last else torch.contiguous_format


def _copies(memory_format: Any, *tensors: Any) -> tuple[int, ...]:
    """Return the bytes of copies in a format of those that are not in it."""
    return tuple(nbytes(each) for each in tensors if not each.is_contiguous(memory_format=memory_format))


def _empty(shape: Sequence[int], like: Any, memory_format: Any) -> Any:
    return torch.empty(shape, dtype=like.dtype, device="meta", memory_format=memory_format)


def _forward(device: Allocator, operator: Any, args: Sequence[Any], _: Mapping[str, Any]) -> Any:
    """Return the output; a copy of the input in cuDNN's format is there before it, that of the weight after it."""
    tensor, weight = args[:2]
    memory_format = _format(tensor, weight)
    with _disable_current_modes():
        shape = operator(*args).shape
    with device.buffers(*_copies(memory_format, tensor)):
        out = _empty(shape, tensor, memory_format)
        device.temporaries(*_copies(memory_format, weight))
    return out


def _backward(device: Allocator, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the gradients; copies in cuDNN's format are beside them, and the memory of the sum for the bias."""
    gradient, tensor, weight, wanted = *args[:3], args[10]
    if args[7] or tensor.ndim != 4:  # transposed, or of other dimensions
        of_input, of_weight, of_bias = operator(*args, **kwargs)
    else:
        of_input, of_weight = _gradients(device, gradient, tensor, weight, wanted)
        of_bias = torch.empty(args[3], dtype=gradient.dtype, device="meta") if wanted[2] else None
    if wanted[2]:
        device.temporaries(*buffers(device.gpu, gradient, [dim for dim in range(gradient.ndim) if dim != 1], 4))
    return of_input, of_weight, of_bias


def _gradients(device: Allocator, gradient: Any, tensor: Any, weight: Any, wanted: Sequence[bool]) -> tuple[Any, Any]:
    """Return the gradients of input and weight. Where the input is in channels last, so is a copy of the gradient, for both."""
    last = _LAST[tensor.ndim]
    own = _format(tensor, weight) if wanted[1] else torch.contiguous_format
    copied = _copies(own, tensor) if wanted[1] else ()
    of_all = _copies(last, gradient) if own is last else ()
    of_input = of_weight = None
    with device.buffers(*copied, *of_all):
        if wanted[0]:
            memory_format = own if of_all else _format(gradient, weight)
            of_input = _empty(tensor.shape, tensor, memory_format)
            device.temporaries(*_copies(memory_format, weight), *(() if of_all else _copies(memory_format, gradient)))
        if wanted[1]:
            memory_format = own if of_all or copied else _format(tensor, gradient)
            more = (() if of_all else _copies(memory_format, gradient)) + (() if copied else _copies(memory_format, tensor))
            with device.buffers(*more):
                of_weight = _empty(weight.shape, weight, memory_format)
    return of_input, of_weight


REPLACED: dict[Any, Replacement] = {
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
}
