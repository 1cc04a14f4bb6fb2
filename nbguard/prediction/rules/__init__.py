"""Memory that CUDA's kernels take and meta tensors do not: by operator, each rule with its source in PyTorch (2.13).

`TEMPORARIES` are bytes that an operator allocates after its outputs and frees before it returns. `REPLACED` stand in for
operators whose outputs have other sizes, or come in another order, than those of the operator on meta tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbguard.prediction.rules import attention, convolutions, indexing, layers, losses, reductions
from nbguard.prediction.rules.rule import Replacement, Temporaries

TEMPORARIES: Mapping[Any, Temporaries] = {
    **reductions.TEMPORARIES,
    **losses.TEMPORARIES,
    **indexing.TEMPORARIES,
    **layers.TEMPORARIES,
}
REPLACED: Mapping[Any, Replacement] = {**attention.REPLACED, **convolutions.REPLACED, **layers.REPLACED, **losses.REPLACED}

UNKNOWN: Mapping[Any, str] = {
    torch.ops.aten._trilinear.default: "bilinear layers",
    torch.ops.aten.im2col.default: "unfold()",
}
"""Operators whose buffers are not known, in words: a fit that uses them is never said to fit."""
