"""The user's line that initialised CUDA, where PyTorch makes the calls queued with `_lazy_call`."""

from __future__ import annotations

import sys
from typing import Any

_seen: list[str] = []


def cuda_line() -> str:
    """Return the line or cell that initialised CUDA, as `In[4], line 2`; empty if it has not been, or nobody saw it."""
    return _seen[0] if _seen else ""


def await_cuda(cell: int | None = None) -> bool:
    """Have the line noted that initialises CUDA; return whether there is nothing more to wait for.

    Where CUDA has been initialised already, by the `cell` that has just ended, that cell is noted.
    """
    cuda: Any = sys.modules.get("torch.cuda")
    if cuda is None or not hasattr(cuda, "_lazy_call"):
        return False
    if cuda.is_initialized():
        if cell is not None and not _seen:
            _seen.append(f"In[{cell}]")
    else:
        cuda._lazy_call(_note)
    return True


def _note() -> None:
    """Note the innermost line of the stack that is the user's own."""
    from nbguard.memory.scan.devices.allocation_sites import Sites, stack_of

    if not _seen:
        _seen.append(Sites().of(stack_of(sys._getframe(1))))
