"""Jobs that views have asked for, where one runs at a time, on the main thread, or beside it while a cell runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbguard.errors import NbguardError

if TYPE_CHECKING:
    from nbguard.frontend.sidebar.protocol import state

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
