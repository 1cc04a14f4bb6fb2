"""The sizes of the workspaces that torch keeps for cuBLAS and for cuBLASLt, as it says or by its rules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_KEEPS_LT = (2, 9)
"""The first torch that keeps a workspace for cuBLASLt (its pull request 156495); one before takes it again for each call."""
_UNIFIES = (2, 12)
"""The first torch whose cuBLASLt has cuBLAS's workspace unless a setting says otherwise (its pull request 175879)."""
_LT_KIB = 1024


def cublas_workspace(torch: Any, properties: Any) -> int | None:
    """Return the bytes of a workspace that torch keeps for cuBLAS, one for each handle and stream.

    CUBLAS_WORKSPACE_CONFIG lists `:KiB:count`; without it, 32 MiB on Hopper and 8.125 MiB elsewhere (torch's
    `getChosenWorkspaceSize`).
    """
    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if ask is not None:
        try:
            return int(ask())
        except RuntimeError:  # after an error that lasts
            return None
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * int(count) for kib, count in sizes) * 1024
    return 32 * 1024**2 if properties.major == 9 else (2 * 4096 + 8 * 16) * 1024


def cublaslt_workspace(torch: Any) -> int | None:
    """Return the bytes of a workspace that torch keeps for cuBLASLt beside each of cuBLAS's; None where it keeps none."""
    if getattr(torch.version, "hip", None):
        return None
    ask = getattr(torch._C, "_cuda_getCublasLtWorkspaceSize", None)
    try:
        told = None if ask is None else int(ask())
    except RuntimeError:  # after an error that lasts
        return None
    return lt_workspace_of(os.environ, told, keeps=torch.__version__ >= _KEEPS_LT, unifies=torch.__version__ >= _UNIFIES)


def lt_workspace_of(settings: Mapping[str, str], told: int | None, *, keeps: bool, unifies: bool) -> int | None:
    """Return the bytes of a workspace of cuBLASLt's own (torch's `getCUDABlasLtWorkspace`), or None where there is none.

    Args:
        settings: environment variables.
        told: the size that torch itself tells, from 2.13 on.
        keeps: this torch keeps such workspaces.
        unifies: it uses cuBLAS's instead unless TORCH_CUBLASLT_UNIFIED_WORKSPACE is 0; others do so only if that is 1.
    """
    unified = {"0": False, "1": True}.get(settings.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", ""), unifies)
    if unified or not keeps:
        return None
    if told is not None:
        return told or None
    number = re.match(r"\s*\+?(\d{1,9})", settings.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return (int(number[1]) if number else _LT_KIB) * 1024 or None
