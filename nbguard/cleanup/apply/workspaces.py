"""Clear what torch keeps for a library and makes anew when it is wanted."""

from __future__ import annotations

import sys
from typing import Any

from nbguard.cleanup.apply.freed_bytes import Gains
from nbguard.errors import NbguardError


def clear_workspaces(gains: Gains) -> None:
    """Clear the workspaces that torch keeps for cuBLAS; `gains` has the bytes of the device that this gave back."""
    torch: Any = sys.modules["torch"]
    if not hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        raise NbguardError("this torch has no way to clear them")
    before = _allocated(torch)
    torch._C._cuda_clearCublasWorkspaces()
    gains.device += before - _allocated(torch)


def _allocated(torch: Any) -> int:
    return sum(int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count()))
