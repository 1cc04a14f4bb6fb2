"""Jobs that views have asked for, where one runs at a time, on the main thread, or beside it while a cell runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError
from nbguard.memory.cells.hooks import cell_id_of, cells_on_stack

if TYPE_CHECKING:
    from nbguard.frontend.sidebar.protocol import state


# --- The thread that ticks while somebody looks, the budget for scans between cells, and the cells that run now.


# --- The budget for scans of the heap between cells that run one after another, where each is paid for before the next is
# due.


SHARE = 0.01
"""Of the time that looks between the cells of a Run All may take."""
_SHORT = 0.5
"""Most seconds of a scan that may be made before it is paid for: the first of a Run All.

With fastai, pandas and matplotlib loaded a scan takes 0.15 to 0.25 s on a quiet machine, and longer on a busy one.
"""


class ScanBudget:
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


_MOST = 32
"""Jobs that may wait. More are refused: nobody clicks so fast."""
_BURST = 16
"""Jobs that are done at once, one after the other. Those after them wait until no request has come for `_QUIET` seconds: a
flood would keep the next cell waiting. `_PAUSE` seconds without a request end the burst."""
_QUIET = 0.5
_PAUSE = 2.0
SUPERSEDED = "superseded: a newer request of this kind came before it began"


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A job to run once, on whatever thread may run it. It holds no object of the user's."""

    run: Callable[[], None]  # the work itself
    failed: Callable[[str], None]  # called with the reason when `run` fails
    rid: str = ""  # the request it answers; empty if none
    kind: str = ""  # only the newest of those of a kind that wait is done; empty if all are
    title: str = ""  # in the list of waiting jobs; empty for the hub's own
    why: str = ""  # it has to wait while a cell runs; empty if it may run beside the cell
    tell_queued: Callable[[str], None] | None = None  # called with `why` as soon as the job waits
    is_told: bool = False  # `tell_queued` has been called


class Jobs:
    """A queue that is worked off on the kernel's main thread while no cell runs, else by a thread that ends with it.

    Args:
        is_busy: says whether a cell runs. Asked on the main thread, its answer holds until that thread is given back.
        on_main: has a function called on the main thread when its event loop comes to it.
    """

    def __init__(self, is_busy: Callable[[], bool], on_main: Callable[[Callable[[], None]], Any]) -> None:
        self._is_busy = is_busy
        self._on_main = on_main
        self._lock = threading.Lock()
        self._pending: list[Job] = []
        self._running: Job | None = None
        self._worker: threading.Thread | None = None
        self._begun = 0  # jobs of this burst
        self._put_at = 0.0  # when the last one came, by the monotonic clock
        self._waits_for_quiet = False

    @property
    def listed(self) -> tuple[state.JobStatus, ...]:
        """Return the jobs that are not done yet, the running one first."""
        if self.is_idle:
            return ()
        from nbguard.frontend.sidebar.protocol import state

        with self._lock:
            running = self._running
            statuses = [] if running is None else [state.JobStatus(running.rid, running.title, "running")]
            statuses += [state.JobStatus(job.rid, job.title, "queued", job.why if job.is_told else "") for job in self._pending]
        return tuple(job for job in statuses if job.title)

    def put(self, job: Job) -> bool:
        """Have a job done. Return whether it was taken: not if too many wait, or one of its name does.

        One of its kind that still waits is told that it is superseded.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._put_at > _PAUSE:
                self._begun = 0
            self._put_at = now
            former = [each for each in self._pending if job.kind and each.kind == job.kind and each.rid != job.rid]
            self._pending = [each for each in self._pending if each not in former]
            names = [each.rid for each in (*self._pending, self._running) if each is not None]
            is_taken = len(names) < _MOST and not (job.rid and job.rid in names)
            if is_taken:
                self._pending.append(job)
        for each in former:
            each.failed(SUPERSEDED)
        self.proceed()
        return is_taken

    def cancel(self, rid: str) -> Job | None:
        """Drop the job of a name, if it still waits, and return it."""
        with self._lock:
            waiting = next((job for job in self._pending if job.rid == rid), None)
            if waiting is not None:
                self._pending.remove(waiting)
            return waiting

    def has(self, rid: str) -> bool:
        """Say whether the job of a name waits or runs."""
        with self._lock:
            return any(job is not None and job.rid == rid for job in (*self._pending, self._running))

    @property
    def is_working(self) -> bool:
        """Say whether a job is being done."""
        return self._running is not None

    @property
    def is_idle(self) -> bool:
        """Say whether there is nothing to do."""
        return not self._pending and self._running is None

    def clear(self) -> None:
        """Drop everything that waits."""
        with self._lock:
            self._pending.clear()

    def proceed(self) -> None:
        """Have the next job done where it can be: after a job was put, and when a cell begins or ends."""
        waiting: list[Job] = []
        with self._lock:
            if not self._pending or self._running is not None:
                return
            if self._is_flooded:
                self._wait_for_quiet()
                return
            if not self._is_busy():
                self._on_main(self._do_on_main)
                return
            waiting = [job for job in self._pending if job.why and not job.is_told]
            if self._worker is None and any(not job.why for job in self._pending):
                self._worker = threading.Thread(target=self._work, name="nbguard worker", daemon=True)
                self._worker.start()
        for job in waiting:
            job.is_told = True
            if job.tell_queued is not None:
                job.tell_queued(job.why)

    @property
    def _is_flooded(self) -> bool:
        """Say whether requests come faster than they are to be done."""
        return self._begun >= _BURST and time.monotonic() - self._put_at < _QUIET

    def _wait_for_quiet(self) -> None:
        """Proceed when the flood may be over, by a timer's thread: the main thread's loop does not turn while a cell runs."""
        if not self._waits_for_quiet:
            self._waits_for_quiet = True
            timer = threading.Timer(_QUIET, self._proceed_after_waiting)
            timer.daemon = True
            timer.start()

    def _proceed_after_waiting(self) -> None:
        self._waits_for_quiet = False
        self.proceed()

    def join(self, timeout: float = 2.0) -> None:
        """See the thread end, which it does when there is nothing for it to do; wait no longer than `timeout` seconds."""
        worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout)

    def _do_on_main(self) -> None:
        job = self._take(on_main=True)
        if job is not None:
            self._do(job)
        self.proceed()

    def _work(self) -> None:
        while (job := self._take(on_main=False)) is not None:
            self._do(job)
        self.proceed()  # the cell may have ended meanwhile

    def _take(self, *, on_main: bool) -> Job | None:
        """Take the next job that this thread may do now. Without one, the worker is at its end."""
        with self._lock:
            may = self._running is None and self._is_busy() is not on_main and not self._is_flooded
            next_job = next((job for job in self._pending if may and (on_main or not job.why)), None)
            if next_job is not None:
                self._pending.remove(next_job)
                self._running = next_job
                self._begun += 1
            elif not on_main:
                self._worker = None
            return next_job

    def _do(self, job: Job) -> None:
        try:
            job.run()
        except NbguardError as error:
            job.failed(str(error))
        except KeyboardInterrupt:
            job.failed("interrupted")
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the kernel more than this job
            job.failed(f"nbguard failed at this ({type(error).__name__}): please report it")
        finally:
            with self._lock:
                self._running = None
