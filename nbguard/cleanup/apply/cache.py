"""The allocator's cache: free segments that PyTorch keeps for later."""

from __future__ import annotations

import sys
from typing import Any


def empty_cache() -> None:
    """Give the allocator's free segments back to the device, on whichever accelerator is in use."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif getattr(torch, "accelerator", None) is not None and torch.accelerator.is_available():
        module: Any = getattr(torch, str(torch.accelerator.current_accelerator().type), None)
        if hasattr(module, "empty_cache"):
            module.empty_cache()
