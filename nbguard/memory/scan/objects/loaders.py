"""DataLoaders and the worker processes behind their iterators."""

from __future__ import annotations

from typing import Any

from nbguard.memory.scan.heap.attributes import attribute_of


def worker_count(obj: Any) -> int:
    """Return how many worker processes a loader is set up with, or an iterator has; 0 if none or unknown.

    fastai's own loader reports 1 always; the truth is in the torch loader behind it (`fake_l`).
    """
    if type(loaders := attribute_of(obj, "loaders")) is list and loaders:
        return worker_count(loaders[0])
    if (behind := attribute_of(obj, "fake_l")) is not None:
        return worker_count(behind)
    if type(workers := attribute_of(obj, "_workers")) is list:
        return len(workers)
    count = attribute_of(obj, "num_workers")
    return count if type(count) is int else 0
