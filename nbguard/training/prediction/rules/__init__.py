"""Memory that CUDA's kernels take and meta tensors do not, by operator, each rule with its source in PyTorch (2.13).

`TEMPORARIES` are bytes that an operator allocates after its outputs and frees before it returns. `REPLACED` stand in for
operators whose outputs have other sizes, or come in another order, than those of the operator on meta tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nbguard.training.prediction.rules import attention, convolutions, indexing, layers, losses, recurrent, reductions
from nbguard.training.prediction.rules.rule import Replacement, Temporaries

TEMPORARIES: Mapping[Any, Temporaries] = {
    **reductions.TEMPORARIES,
    **losses.TEMPORARIES,
    **indexing.TEMPORARIES,
    **layers.TEMPORARIES,
}
REPLACED: Mapping[Any, Replacement] = {
    **attention.REPLACED,
    **convolutions.REPLACED,
    **layers.REPLACED,
    **losses.REPLACED,
    **recurrent.REPLACED,
}

_LIBRARIES = {
    "Fourier transforms": ("_fft_r2c", "_fft_c2r", "_fft_c2c"),
    "torch.linalg": (
        "_linalg_det",
        "_linalg_eigh",
        "_linalg_eigvals",
        "_linalg_slogdet",
        "_linalg_solve_ex",
        "_linalg_svd",
        "linalg_cholesky_ex",
        "linalg_eig",
        "linalg_inv_ex",
        "linalg_ldl_factor_ex",
        "linalg_lu",
        "linalg_lu_factor_ex",
        "linalg_matrix_exp",
        "linalg_qr",
        "linalg_solve_triangular",
        "cholesky_inverse",
        "cholesky_solve",
    ),
}
"""Operators that a library of CUDA's computes: cuFFT, cuSOLVER, MAGMA."""
UNKNOWN: Mapping[Any, str] = {
    getattr(torch.ops.aten, name).default: words for words, names in _LIBRARIES.items() for name in names
}
"""Operators whose buffers are not known, in words: a fit that uses them is never said to fit."""
