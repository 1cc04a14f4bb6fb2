"""The thread that ticks while somebody looks, and the budget for scans between cells, each paid for before the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.01
"""Of the time that looks between the cells of a Run All may take."""
OF_ITS_CELL = 0.02
"""Of the time of one cell that the scan after it may take, however many there were."""
_UNFELT = 0.05
"""Seconds of a scan that may be made after any cell."""
_SHORT = 0.5
"""Most seconds of a scan that may be made before it is paid for: the first of a Run All.

With fastai, pandas and matplotlib loaded a scan takes 0.15 to 0.25 s on a quiet machine, and longer on a busy one.
"""


class ScanBudget:
    """Allows a scan after a cell that took much longer, and else once `SHARE` of the time since the last one pays for that.

    Only scans that cells have to wait for are paid for. Others say how long one takes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._next = clock()
        self._usual: float | None = None  # seconds that the last scan took; None without one

    def allows(self, cell: float) -> bool:
        """Say whether the next cell may wait for a scan now; it may not before the first scan, whose time is unknown.

        Args:
            cell: seconds that the cell took which has just ended.
        """
        if self._usual is None:
            return False
        if self._usual <= max(_UNFELT, OF_ITS_CELL * cell):
            return True
        now = self._clock()
        return now >= self._next and self._usual <= max(_SHORT, SHARE * (now - self._start))

    def measure(self, seconds: float) -> None:
        """Note that a scan took `seconds` without a waiting cell."""
        self._usual = seconds

    def spend(self, seconds: float) -> None:
        """Note that cells waited `seconds` for a scan, and put the next one off accordingly."""
        self._usual = seconds
        self._next = max(self._next, self._clock() + seconds / SHARE - seconds)


_COSTLY = 0.002
"""Seconds of processor time that half of `_WINDOW` ticks may take more than: else ticks become half as many."""
_WINDOW = 20
_SLOWEST = 8
_LEAST = 0.1
"""Seconds from one tick to the next, however often somebody wakes the thread."""


class Sampler:
    """Calls `tick` every `interval()` seconds, in a thread of its own, until `interval()` is None.

    A tick that costs too much makes itself rare: its processor time is taken from a training cell.
    """

    def __init__(self, tick: Callable[[], None], interval: Callable[[], float | None]) -> None:
        self._tick = tick
        self._interval = interval
        self._lock = threading.Lock()
        self._silence = threading.Lock()  # held until somebody wakes the thread: to wait for it costs less than a condition
        self._silence.acquire()
        self._thread: threading.Thread | None = None
        self._costs: list[float] = []
        self._ticked = 0.0  # when the last tick began, by the monotonic clock
        self._slowness = 1

    def wake(self) -> None:
        """Tick at once, and go on: somebody has begun to look, or there is something new to say."""
        with self._lock:
            self._break_silence()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbguard sampler", daemon=True)
                self._thread.start()

    def end(self, timeout: float = 2.0) -> None:
        """See the thread end, as it does once `interval()` is None; wait no longer than `timeout` seconds."""
        with self._lock:
            thread = self._thread
            self._break_silence()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    @property
    def slowness(self) -> int:
        """Return the factor that ticks are rarer than asked for, because they cost too much."""
        return self._slowness

    def _run(self) -> None:
        interval = self._wait(0.0)
        while interval is not None:
            start, self._ticked = time.thread_time(), time.monotonic()
            self._tick()
            self._weigh(time.thread_time() - start)
            interval = self._wait(interval)

    def _wait(self, interval: float) -> float | None:
        """Wait until the next tick is due; return the seconds after it. If there is to be none, the sampler has no thread."""
        self._silence.acquire(timeout=interval * self._slowness)
        time.sleep(max(0.0, min(interval, self._ticked + _LEAST - time.monotonic())))
        with self._lock:
            self._silence.acquire(blocking=False)
            seconds = self._interval()
            if seconds is None:
                self._thread = None
            return seconds

    def _break_silence(self) -> None:
        if self._silence.locked():
            self._silence.release()

    def _weigh(self, seconds: float) -> None:
        self._costs.append(seconds)
        if len(self._costs) < _WINDOW:
            return
        usual = sorted(self._costs)[_WINDOW // 2]
        self._costs.clear()
        if usual > _COSTLY and self._slowness < _SLOWEST:
            self._slowness *= 2
        elif usual < _COSTLY / 2 and self._slowness > 1:
            self._slowness //= 2
