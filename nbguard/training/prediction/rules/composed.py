"""Operators that have no kernel of their own: PyTorch composes them of others below autograd, and each of those takes memory.

A trace sees them as one operator. It calls PyTorch's own composition instead, whose steps it then sees one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten
COMPOSED = frozenset(
    {
        _aten._trilinear.default,  # of bilinear layers (aten/src/ATen/native/Linear.cpp)
        _aten.affine_grid_generator.default,  # AffineGridGenerator.cpp
        _aten.dist.default,  # Distance.cpp
        _aten.norm.Scalar,  # ReduceOps.cpp
        _aten.soft_margin_loss.default,  # Loss.cpp
        _aten.soft_margin_loss.out,
        _aten.soft_margin_loss_backward.default,
        _aten.soft_margin_loss_backward.grad_input,
    }
)


def compose(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the outputs of the composition, the one of a backend without any kernel."""
    return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *args, **kwargs)
