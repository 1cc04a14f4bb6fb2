"""Let go of copies that their owner can do without."""

from __future__ import annotations

import gc
import sys
from typing import Any

from nbguard.memory.facts import CacheKind


def forget(shell: Any, cache: CacheKind, refs: set[int]) -> None:
    """Take the objects with the ids `refs` out of a cache."""
    if cache == "garbage":
        gc.garbage.clear()
    elif cache == "run":
        _drop(shell._main_mod_cache, {path for path, module in shell._main_mod_cache.items() if id(module.__dict__) in refs})
    elif cache == "store":
        _drop(shell.db.cache, {path for path, entry in shell.db.cache.items() if id(entry[0]) in refs})
    else:
        figures = sys.modules["matplotlib._pylab_helpers"].Gcf
        for number in [number for number, manager in figures.figs.items() if id(manager) in refs]:
            figures.destroy(number)


def _drop(cache: dict[Any, Any], keys: set[Any]) -> None:
    for key in keys:
        del cache[key]
