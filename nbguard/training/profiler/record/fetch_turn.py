"""The turn of a fetch that is profiled, while nbguard's other threads run no Python.

From Python 3.12 on a profiler takes the calls of all threads for calls of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PATIENCE = 0.05  # seconds; a sample of a stack takes some 50 µs


class Turn:
    """A lock, held by the fetch that is profiled and by another thread that looks. It knows when the last such fetch ended."""

    __slots__ = ("_clock", "ended", "lock")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.lock = threading.Lock()
        self.ended: int = 0  # by the clock

    def begin(self) -> bool:
        """Take the turn; say whether it could be had."""
        return self.lock.acquire(timeout=_PATIENCE)

    def end(self) -> None:
        """Give it back."""
        self.ended = self._clock()
        self.lock.release()
