"""Losses that are computed element by element before they are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbguard.prediction.hardware import Gpu
from nbguard.prediction.rules.reductions import buffers
from nbguard.prediction.rules.rule import Allocator, Replacement, Temporaries, argument, nbytes

_aten = torch.ops.aten


def _cross_entropy_of_bits(_: Gpu, args: Sequence[Any], __: Mapping[str, Any]) -> tuple[int, ...]:
    """Return two tensors of the input's size (`binary_cross_entropy_with_logits` in aten/src/ATen/native/Loss.cpp)."""
    return nbytes(args[0]), nbytes(args[0])


def _squared_error(device: Allocator, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the loss, summed up as any reduction, in a storage of the input's size, which lives as long as the loss.

    Source: `mse_loss_out` in aten/src/ATen/native/Loss.cpp: the output is made as large as the input, then resized, and no
    resizing to fewer bytes gives memory back.
    """
    if not argument(args, kwargs, 2, "reduction", 1):
        return NotImplemented
    out = torch.empty_like(args[0])
    device.temporaries(nbytes(args[0]), *buffers(device.gpu, args[0], None, 4))
    return out.resize_(())


REPLACED: dict[Any, Replacement] = {_aten.mse_loss.default: _squared_error}
TEMPORARIES: dict[Any, Temporaries] = {_aten.binary_cross_entropy_with_logits.default: _cross_entropy_of_bits}
