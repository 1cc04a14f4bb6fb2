"""Switches PyTorch's history of its allocator on and off, bounded, and leaves one that somebody else records alone.

Opens no context: where CUDA is not in use yet, recording begins as soon as it is. PyTorch's own call would initialise CUDA's
side of it at once.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from nbguard.errors import NbguardError, NoTorchError
from nbguard.memory.core.recording import DEFAULT_ENTRIES, Recording, check_entries
from nbguard.memory.scan.oom.chain import cell_now

_NEEDED = frozenset({"enabled", "context", "stacks", "max_entries"})


class _Ours:
    """The recording that nbguard has asked for, and how far torch has taken it up."""

    def __init__(self) -> None:
        self.entries: int | None = None  # of each device; None if nbguard records nothing
        self.is_begun = False  # torch records in our name
        self.is_queued = False  # torch calls `_begin` once it initialises CUDA
        self.since: int | None = None  # number of the cell that asked for it


_OURS = _Ours()


def recording() -> Recording:
    """Return the state of the recording. Asks torch only where CUDA is in use: before, its answer would be a crash."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return Recording("off") if _OURS.entries is None else Recording("waiting", _OURS.entries, _OURS.since)
    if not _is_enabled(torch):
        _OURS.entries, _OURS.is_begun = None, False  # whoever ended it meant ours
        return Recording("off")
    if _OURS.entries is not None and _OURS.is_begun:
        return Recording("on", _OURS.entries, _OURS.since)
    return Recording("theirs")


def start(entries: int = DEFAULT_ENTRIES) -> Recording:
    """Keep the last `entries` of each device from now on, with the Python lines that allocated; return the state then.

    Raises:
        NoTorchError: PyTorch is not imported yet.
        NbguardError: `entries` is no number of entries, or this PyTorch has no such history.
    """
    torch = _torch()
    check_entries(entries)
    before = recording()
    if before.state in ("on", "theirs"):
        return before
    _OURS.entries, _OURS.since, _OURS.is_begun = entries, cell_now(), False
    if not _OURS.is_queued:
        _OURS.is_queued = not torch.cuda.is_initialized()
        torch.cuda._lazy_call(_begin)
    after = recording()
    return Recording(after.state, after.entries, after.since, changed=True)


def stop() -> Recording:
    """End nbguard's recording and forget its history; a recording of somebody else stays. Return the state then."""
    before = recording()
    if before.state == "on":
        _torch().cuda.memory._record_memory_history(None)
    if before.state in ("on", "waiting"):
        _OURS.entries, _OURS.is_begun = None, False
        return Recording("off", changed=True)
    return before


def _begin() -> None:
    """Tell torch. It calls this itself while it initialises CUDA, which must not be disturbed."""
    torch: Any = sys.modules["torch"]
    _OURS.is_queued = False
    try:
        if _OURS.entries is None or _is_enabled(torch):
            return
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=_OURS.entries)
        _OURS.is_begun = True
    except Exception:  # noqa: BLE001 - another PyTorch than those that were tried
        _OURS.entries = None


def _torch() -> Any:
    """Return torch if it has a history that can be bounded (2.1 and later do)."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise NoTorchError
    if not hasattr(torch._C, "_cuda_record_memory_history") or not hasattr(torch._C, "_cuda_isHistoryEnabled"):
        raise NbguardError("this PyTorch records no history of its allocator: it is built without CUDA, or older than 2.4")
    try:
        known = set(inspect.signature(torch.cuda.memory._record_memory_history).parameters)
    except (AttributeError, TypeError, ValueError):
        known = set()
    if not known >= _NEEDED:
        raise NbguardError(f"PyTorch {torch.__version__} records its allocator's history in a way that nbguard does not know")
    return torch


def _is_enabled(torch: Any) -> bool:
    """Say whether torch records. Only once CUDA is initialised."""
    ask = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(ask()) if ask is not None else False
