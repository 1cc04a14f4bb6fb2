"""Let go of copies that their owner can do without."""

from __future__ import annotations

import gc
import sys
from typing import Any

from nbguard.scan.roots.registries import GARBAGE


def forget(shell: Any, label: str, refs: set[int]) -> None:
    """Take the objects with the ids `refs` out of the cache that the root `label` stands for."""
    if label == GARBAGE:
        gc.garbage.clear()
    elif label.startswith("%run "):
        _drop(shell._main_mod_cache, {path for path, module in shell._main_mod_cache.items() if id(module.__dict__) in refs})
    elif label.startswith("%store "):
        _drop(shell.db.cache, {path for path, entry in shell.db.cache.items() if id(entry[0]) in refs})
    else:
        figures = sys.modules["matplotlib._pylab_helpers"].Gcf
        for number in [number for number, manager in figures.figs.items() if id(manager) in refs]:
            figures.destroy(number)


def _drop(cache: dict[Any, Any], keys: set[Any]) -> None:
    for key in keys:
        del cache[key]
