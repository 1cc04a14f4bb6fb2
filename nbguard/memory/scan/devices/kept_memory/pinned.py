"""Page-locked host memory of torch's pinned allocator, as its counters tell it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nbguard.memory.core.facts import PinnedFacts

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
