"""The part of PyTorch or a library that keeps memory no Python object holds, and the line that helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from nbguard.memory.core.advice import HARD, NONE, RECORD_ON, Advice
from nbguard.memory.core.facts import HolderSource
from nbguard.memory.core.references.explain import Path, Why
from nbguard.memory.core.references.holders import Holder

_KEEPERS: Mapping[HolderSource, tuple[str, str, Advice]] = MappingProxyType(
    {
        "workspaces": (
            "PyTorch → cuBLAS",
            "scratch memory of matrix products, one block for each thread that has made one; the next product makes it again",
            HARD,
        ),
        "graphs": (
            "PyTorch → private pool",
            "it is freed with the CUDA graph captured into it, or with the MemPool",
            NONE,
        ),
        "site": ("C++ → a library", "made at that line of yours and kept by the library that the line calls", NONE),
        "unknown": (
            "C++ → a library",
            "buffers and caches of libraries; once the history is on, their new allocations are listed by line",
            RECORD_ON,
        ),
        "changed": ("another thread", "it allocated or freed memory during the scan; scan again", NONE),
    }
)
"""By the source of a holder: the keeper, how much it keeps, and the line to run."""


def is_explained(row: Holder) -> bool:
    """Return whether `explain_unheld` knows who keeps the memory of a row without a root."""
    return row.source in _KEEPERS


def explain_unheld(row: Holder) -> Why:
    """Return why the blocks of a row without a root are allocated. Only for a row that `is_explained`."""
    keeper, effect, advice = _KEEPERS[row.source]
    release = replace(advice, effect=effect, frees=None, targets=())
    if row.release != NONE:  # of the pool's own graph or MemPool
        release = replace(row.release, effect=row.release.effect if not row.release.targets else effect)
    path = Path(
        steps=(keeper,),
        cell=None,
        stale=False,
        advice=release,
        storages_only=True,
    )
    return Why(name=row.label, what=row.what, nbytes=row.retained, paths=(path,))
