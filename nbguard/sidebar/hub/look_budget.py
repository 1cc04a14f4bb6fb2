"""The budget for looks at the heap between cells that run one after another: each is paid for before the next is due."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.01
"""Of the time that looks between the cells of a Run All may take."""


class LookBudget:
    """Allows a look once so much time has passed since the last one that this took no more than `SHARE` of it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._next: float | None = None

    @property
    def allows(self) -> bool:
        """Say whether a look may be made now. Before the first, nobody knows how long one takes: not then."""
        return self._next is not None and self._clock() >= self._next

    def spend(self, seconds: float) -> None:
        """Note that a look took `seconds`, and put the next one off accordingly."""
        self._next = self._clock() + seconds / SHARE - seconds
