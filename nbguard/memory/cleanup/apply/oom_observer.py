"""An observer of running out of memory, which notes numbers at the moment of the failure, before any frame is unwound.

torch calls its observers with the allocator's lock released and offers no way to take one off: ours is attached once per
process, when CUDA is first used, and can be switched off. It keeps numbers only.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from nbguard.memory.core.oom_facts import OomNote
from nbguard.memory.scan.devices.cuda import (
    allocator_settings,
    memory_fraction,
    segments_by_device,
)
from nbguard.memory.scan.devices.reserve import device_counters
from nbguard.memory.scan.oom.chain import NOTES, cell_now, with_free_blocks
from nbguard.memory.scan.oom.failed_runs import counts_of

_ATTACH = "_cuda_attach_out_of_memory_observer"


class _Observer:
    """The state of the observer in this process."""

    def __init__(self) -> None:
        self.is_attached = False  # for good: torch has no way to take an observer off
        self.is_on = False
        self.inside: set[int] = set()  # threads where it notes a failure now


_OBSERVER = _Observer()


def attach() -> bool:
    """Watch for failures from now on, as soon as CUDA is in use; say whether that could be arranged.

    May be called at any time, and often. Opens no context: where CUDA is not initialised yet, torch calls back when it is.
    Without torch, or with one that has no CUDA, nothing is done.
    """
    torch: Any = sys.modules.get("torch")
    try:
        if not hasattr(torch._C, _ATTACH):
            return False
        _OBSERVER.is_on = True
        if not _OBSERVER.is_attached:
            _OBSERVER.is_attached = True
            torch.cuda._lazy_call(_attach_now)
    except Exception:  # noqa: BLE001 - no torch, half an import, another torch: there is no observer then, and a card without
        return False
    return True


def detach() -> None:
    """Note nothing from now on, and forget all notes."""
    _OBSERVER.is_on = False
    NOTES.clear()


def _attach_now() -> None:
    try:
        getattr(sys.modules["torch"]._C, _ATTACH)(_observe)
    except Exception:  # noqa: BLE001 - this runs while torch initialises CUDA, which it must not disturb
        _OBSERVER.is_on = False


def _observe(device: int, requested: int, allowed: int, free: int, *_: int) -> None:
    """Note a failure. Called by torch, in whichever thread asked for memory; an interrupt that falls in here is the user's."""
    thread = threading.get_ident()
    if not _OBSERVER.is_on or thread in _OBSERVER.inside:
        return
    _OBSERVER.inside.add(thread)
    try:
        NOTES.append(_note(device, requested, allowed, free))
    except Exception:  # noqa: BLE001 - what is raised in here would take the place of torch's own error
        return
    finally:
        _OBSERVER.inside.discard(thread)


def _note(device: int, requested: int, allowed: int, free: int) -> OomNote:
    """Return the state of `device`. `allowed` is its size or, with a memory fraction, that part of it."""
    torch: Any = sys.modules["torch"]
    stats = device_counters(device)
    allocated, reserved = (stats.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    total = int(torch.cuda.get_device_properties(device).total_memory)
    fraction = memory_fraction(device)
    is_limited = allowed < 0.98 * total if fraction is None else fraction < 1
    blocks = sum(stats.get(name, {}).get("all", {}).get("current", 0) for name in ("active", "inactive_split"))
    note = OomNote(
        device=f"cuda:{device}",
        requested=requested,
        total=total,
        free=free,
        limit=allowed if is_limited else None,
        allocated=allocated.get("current", 0),
        reserved=reserved.get("current", 0),
        peak_allocated=allocated.get("peak", 0),
        peak_reserved=reserved.get("peak", 0),
        settings=allocator_settings(),
        cell=cell_now(),
        time=time.time(),
        counts=counts_of(stats),
    )
    return with_free_blocks(note, blocks, lambda: segments_by_device().get(device, ()))
