"""DataLoaders and the worker processes behind their iterators."""

from __future__ import annotations

from typing import Any

from nbguard.probes.labels import attributes_of


def worker_count(obj: Any) -> int:
    """Return how many worker processes a loader is set up with, or an iterator has; 0 if none or unknown.

    fastai's own loader reports 1 always; the truth is in the torch loader behind it (`fake_l`).
    """
    found = attributes_of(obj) or {}
    if type(loaders := found.get("loaders")) is list and loaders:
        return worker_count(loaders[0])
    if "fake_l" in found:
        return worker_count(found["fake_l"])
    if type(workers := found.get("_workers")) is list:
        return len(workers)
    count = found.get("num_workers", 0)
    return count if type(count) is int else 0
