"""The thread that ticks while somebody looks, the budget for scans between cells, and the cells that run now."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

from nbguard.memory.cells.hooks import cell_id_of, cells_on_stack

# --- The budget for scans of the heap between cells that run one after another, where each is paid for before the next is
# due.


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


# --- Cells of the user that run now, and the kernel's status where ipykernel would call it idle meanwhile.


class Busy:
    """Knows of the cell that runs, from its beginning to its end.

    For every message that is handled while a cell runs, ipykernel publishes `busy` and then `idle`, and JupyterLab shows the
    kernel as idle from there on. `again` says `busy` once more, in the cell's name.
    """

    def __init__(self, shell: Any, kernel: Any) -> None:
        self._shell = shell
        self._kernel = kernel
        self._lock = threading.Lock()
        self._cell: int | None = None
        self._ended: int | None = None
        self._parent: Any = None

    @property
    def cell(self) -> int | None:
        """Return the number of the cell that runs; None if none does."""
        return self._cell

    @property
    def ended(self) -> int | None:
        """Return the number of the last cell that has ended; None if none has."""
        if self._ended is not None or self._cell is not None:
            return self._ended
        return len(self._shell.history_manager.input_hist_parsed) - 1 or None

    @property
    def cell_id(self) -> str:
        """Return the id of the current cell in its notebook, or "" without one or if the frontend does not tell it."""
        return cell_id_of(self._parent)

    def begin(self, *, is_running: bool = False) -> None:
        """Note, in the thread of the cell, that one begins, or that one is running already."""
        parent = self._kernel.get_parent("shell")
        stored = len(self._shell.history_manager.input_hist_parsed)  # IPython counts a cell now before, now after it has run
        with self._lock:
            self._cell, self._parent = stored - is_running, parent

    def end(self) -> int | None:
        """Note that it ended, and return its number. From here on nothing says `busy`: the kernel has the last word."""
        with self._lock:
            ended, self._cell, self._parent = self._cell, None, None
            self._ended = ended
        return ended

    def again(self) -> None:
        """Say `busy` again after the message that is handled now, if a cell runs: once the kernel has said `idle`."""
        if self._cell is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._say()
        else:
            loop.call_soon(self._say)  # the kernel says `idle` before its loop comes to this

    def _say(self) -> None:
        with self._lock:
            if self._cell is not None:
                state = {"execution_state": "busy"}
                self._kernel.session.send(self._kernel.iopub_socket, "status", state, parent=self._parent, ident=b"status")


def is_in_cell(shell: Any) -> bool:
    """Say whether this is called from a cell whose end IPython will tell: not from a silent one, as a startup file is."""
    parent = getattr(shell, "parent_header", None)
    if type(parent) is not dict or not parent:  # nothing has been asked of the kernel yet
        return False
    return cells_on_stack() > 0 and not parent.get("content", {}).get("silent", False)


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
