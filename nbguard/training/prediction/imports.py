"""The time that first imports take, as a trace meets parts of PyTorch that this process has not used yet."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ImportTime:
    """The time that imports took."""

    seconds: float = 0.0


@contextmanager
def import_time() -> Iterator[ImportTime]:
    """Yield the time that the import statements of this thread take in the context, those that load a module."""
    total, former, thread, depth = ImportTime(), builtins.__import__, threading.get_ident(), 0

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth or threading.get_ident() != thread:
            return former(*args, **kwargs)
        loaded, started = len(sys.modules), time.perf_counter()
        depth += 1
        try:
            return former(*args, **kwargs)
        finally:
            depth -= 1
            if len(sys.modules) != loaded:
                total.seconds += time.perf_counter() - started

    builtins.__import__ = timed
    try:
        yield total
    finally:
        builtins.__import__ = former
