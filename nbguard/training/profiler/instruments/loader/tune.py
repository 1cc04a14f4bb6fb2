"""The time of a batch with other numbers of workers, measured on a copy of the loader, in a process of its own.

The process is forked after the fit: the trials change random generators, the dataset and its transforms only in the
copy. It is ended with all that it has started, so that a dataset that hangs costs no more than its time limit.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbguard.memory.scan.devices.cores import usable_cores
from nbguard.memory.scan.objects.loaders import worker_count
from nbguard.training.profiler.analysis.loader.tuning import WorkerTuning, candidates, choose, is_enough, workers_words
from nbguard.training.profiler.analysis.report import WorkerTrial
from nbguard.training.profiler.checks.switches import unwarned
from nbguard.training.profiler.instruments.loader.trial import reason_against, serve
from nbguard.units import format_bytes

_ALL = 60  # seconds for all trials together
_SHARED = "/dev/shm"  # noqa: S108 - where torch's workers put their batches
_AHEAD = 2  # batches that a worker holds, and as many on their way


def tune(
    loader: Any | None,
    step: int,
    *,
    seconds: float = 1.5,
    cores: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> WorkerTuning:
    """Return the trials, the number of workers that they speak for, and a sentence that says why.

    Args:
        loader: torch's or a Learner's own; it is left as it is. None if it is gone.
        step: nanoseconds of a batch without waiting for data.
        seconds: for each candidate, after its warm-up.
        cores: that may be used; by default as the system says.
        clock: seconds, for the limits.
    """
    reason = reason_against(loader)
    if reason:
        return WorkerTuning(sentence=f"not tuned: {reason}")
    current = worker_count(loader)
    trials: list[WorkerTrial] = []
    with _Process(loader, seconds, clock) as process:
        trouble = _climb(process, trials, candidates(current, cores or usable_cores()), current, step)
    best, sentence = choose(trials, current, step)
    return WorkerTuning(tuple(trials), best, "; ".join(part for part in (sentence, trouble) if part))


def _climb(process: _Process, trials: list[WorkerTrial], to_try: tuple[int, ...], current: int, step: int) -> str:
    """Add the trials that are worth making; return the reason why no more were made, in words, if there is one."""
    batch = 0
    for workers in to_try:
        words = workers_words(workers)
        room, need = _room(), 2 * _AHEAD * workers * batch
        if need > room:
            return f"{words} not tried: batches on their way take {format_bytes(need)}, {_SHARED} has {format_bytes(room)}"
        answer = process.ask(workers)
        if type(answer) is str:
            return f"stopped with {words}: {answer}"
        per_batch, first, batch, note = answer
        trials.append(WorkerTrial(workers, per_batch, first, note))
        if is_enough(trials, current, step):
            break
    return ""


def _room() -> int:
    """Return the free bytes of shared memory; where there is no such file system it is not limited by one."""
    try:
        return shutil.disk_usage(_SHARED).free
    except OSError:
        return sys.maxsize


class _Process:
    """The process of the trials; at the end it is gone, with all that it has started."""

    def __init__(self, loader: Any, seconds: float, clock: Callable[[], float]) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._seconds, self._clock = seconds, clock
        self._end = clock() + _ALL
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, loader, seconds), name="nbguard tuning")
        with unwarned(DeprecationWarning):  # of Python 3.12: a fork beside threads, as torch's own workers
            self._process.start()
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def ask(self, workers: int) -> Any:
        """Return the figures of one candidate, or why there are none."""
        limit = max(0.0, min(10 * self._seconds + 5, self._end - self._clock()))
        try:
            self._pipe.send(workers)
            return self._pipe.recv() if self._pipe.poll(limit) else f"no figure in {limit:.0f} s"
        except (EOFError, OSError):
            return "the process died"

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a group of its own, with its workers and the processes they started
        self._process.kill()
        self._process.join(5)
        self._pipe.close()
