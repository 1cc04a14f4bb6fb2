"""Memory that torch keeps, in the workspaces of cuBLAS and cuBLASLt, and in its pinned allocator of host memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from nbguard.memory.core.facts import PinnedFacts

# --- Page-locked host memory of torch's pinned allocator, as its counters tell it.


_COUNTS_FREED = (2, 13)
"""The first torch whose counter of the bytes in use goes down where a block is freed (its pull request 183067 says why)."""


def pinned_facts() -> PinnedFacts | None:
    """Return the page-locked host memory of torch's pinned allocator; None if there is none, or torch does not count it."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return pinned_of(torch.cuda.host_memory_stats(), counts_freed=bool(torch.__version__ >= _COUNTS_FREED))


def pinned_of(stats: Mapping[str, Any], *, counts_freed: bool) -> PinnedFacts | None:
    """Return the figures of `torch.cuda.host_memory_stats`, or None where nothing is held.

    Up to torch 2.12 a block that is freed stays in `active_bytes.current`, and `active_bytes.freed` never rises above 0: with
    each block that is used again the counter moves further away. The bytes in use are known where the counters say that some
    were freed, or, before any was, of a torch that `counts_freed`; and in either case only up to the held bytes. Torch 2.7 to
    2.9 have other counters: `reserved_bytes` are the held bytes, and the bytes in use are unknown.
    """
    reserved = int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))
    if reserved <= 0:
        return None
    active, freed = int(stats.get("active_bytes.current", -1)), int(stats.get("active_bytes.freed", 0))
    is_counted = freed > 0 or (freed == 0 and counts_freed)
    return PinnedFacts(active if is_counted and 0 <= active <= reserved else None, reserved)


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
