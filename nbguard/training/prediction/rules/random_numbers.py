"""Samples and permutations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nbguard.training.prediction.hardware import Gpu
from nbguard.training.prediction.rules.rule import Temporaries, argument, nbytes

_aten = torch.ops.aten
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
    _aten.randperm.default: _permutation,
    _aten.randperm.generator: _permutation,
    _aten.multinomial.default: _draws,
    _aten.bernoulli.default: _coin,
}
