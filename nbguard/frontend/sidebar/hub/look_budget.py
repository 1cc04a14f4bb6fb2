"""The budget for scans of the heap between cells that run one after another, where each is paid for before the next is due."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.01
"""Of the time that looks between the cells of a Run All may take."""
_SHORT = 0.5
"""Most seconds of a scan that may be made before it is paid for: the first of a Run All.

With fastai, pandas and matplotlib loaded a scan takes 0.15 to 0.25 s on a quiet machine, and longer on a busy one.
"""


class LookBudget:
    """Allows a scan once so much time has passed since the last one that this took no more than `SHARE` of it.

    Only scans that cells have to wait for are paid for. Others say how long one takes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._next = clock()
        self._usual: float | None = None  # seconds that the last scan took; None without one

    @property
    def allows(self) -> bool:
        """Say whether cells may wait for a scan now. Not before the first one, whose time is unknown."""
        now = self._clock()
        if self._usual is None or now < self._next:
            return False
        return self._usual <= max(_SHORT, SHARE * (now - self._start))

    def measure(self, seconds: float) -> None:
        """Note that a scan took `seconds` without a waiting cell."""
        self._usual = seconds

    def spend(self, seconds: float) -> None:
        """Note that cells waited `seconds` for a scan, and put the next one off accordingly."""
        self._usual = seconds
        self._next = self._clock() + seconds / SHARE - seconds
