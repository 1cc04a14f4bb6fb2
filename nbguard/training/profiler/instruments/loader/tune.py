"""The time of a batch with other numbers of workers, measured on a copy of the loader, in a process of its own.

The process is forked after the fit: the trials change random generators, the dataset and its transforms only in the
copy. It is ended with all that it has started, so that a dataset that hangs costs no more than its time limit.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import get_ident
from typing import Any

from nbguard.memory.scan.devices.host import usable_cores
from nbguard.memory.scan.heap.kinds import attribute_of, attributes_of
from nbguard.memory.scan.learners import worker_count
from nbguard.training.profiler.analysis.loader.slowest import LoaderFacts
from nbguard.training.profiler.analysis.loader.verdict import WorkerTuning, candidates, choose, is_enough, workers_words
from nbguard.training.profiler.analysis.report import WorkerTrial
from nbguard.training.profiler.checks.switches import unwarned
from nbguard.training.profiler.instruments.loader.fetching import FetchSamples, FetchTimer, facts_of, together
from nbguard.training.profiler.instruments.loader.workers import TimedLoop, WorkerBoard, facts_of_iterator, shown
from nbguard.training.profiler.record.log import Patches
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import format_bytes

# --- Watches a fit's loaders, with their settings, the cost of their fetches and the function that costs most.


Function = Callable[..., Any]

_LOADERS = 32  # that are watched; a fit that makes more makes the same one again
_BOARDS = 8  # of one loader that are listened to: later ones make the earliest a figure


class _Watched:
    """The observations of one loader so far. The loader itself is held weakly."""

    def __init__(self, ref: weakref.ref[Any] | None) -> None:
        self.ref = ref
        self.facts = LoaderFacts(dataset="")
        self.timer = FetchTimer()
        self.boards: list[WorkerBoard] = []
        self.past = FetchSamples()
        self.iterators = 0
        self.starts: list[int] = []
        self.note = ""
        self.copied = 0  # bytes, by all workers of an iterator that is no longer listened to

    def part(self) -> FetchSamples:
        """Return the samples of its fetches."""
        return together([self.past, self.timer.part(), *(part for board in self.boards for part in board.read())])

    def facts_of_use(self) -> LoaderFacts:
        """Return all that is known of it."""
        fetch = facts_of(self.part())
        note = self.note or fetch.note
        if not note and not fetch.steps:
            note = "not known: no fetch was profiled; it takes two of the same process"
        fetch = replace(fetch, steps=tuple(map(shown, fetch.steps)), note=note)
        start = round(median(self.starts)) if self.starts else None
        copied = max([self.copied, *(_copied(board.read()) for board in self.boards)])
        return replace(self.facts, iterators=self.iterators, start=start, fetch=fetch, copied=copied)

    def new_board(self, workers: int) -> WorkerBoard:
        """Return the board of the workers that are about to start."""
        board = WorkerBoard(workers, self.part())
        self.boards.append(board)
        if len(self.boards) > _BOARDS:
            oldest = self.boards.pop(0)
            oldest.close()
            samples = [*oldest.read()]
            self.past = together([self.past, *samples])
            self.copied = max(self.copied, _copied(samples))
        return board


def _copied(samples: Iterable[FetchSamples]) -> int:
    """Return the bytes that the workers of one iterator have copied together."""
    return sum(part.copied for part in samples)


class LoaderWatch:
    """Watches every loader that a fit asks for batches, and their workers, as far as these are started meanwhile."""

    watches = "fetches of loaders"

    def __init__(self) -> None:
        self._patches = Patches()
        self._fetches = Patches()
        self._starts = Patches()  # while workers start
        self._pid = os.getpid()
        self._watched: list[_Watched] = []
        self._iterators: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
        self._counters: weakref.WeakKeyDictionary[Any, FetchTimer] = weakref.WeakKeyDictionary()
        self._current: tuple[Callable[[], Any], FetchTimer | None] = (lambda: None), None  # a fetcher, which is asked often
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._handed: _Watched | None = None  # is watched on by another watch
        self._awaited: tuple[_Watched, int] | None = None  # waits for its first batch
        self._fresh: _Watched | None = (
            None  # whose purpose is not known yet: some loops ask for several batches before they train
        )

    def start(self, recorder: Recorder) -> None:
        """Put the clocks around fetches."""
        from torch.utils.data import dataloader

        self._recorder = recorder
        self._patches.put(dataloader._BaseDataLoaderIter, "__init__", self._init)
        self._patches.put(dataloader._MultiProcessingDataLoaderIter, "__init__", self._init_with_workers)
        self._time_fetches()
        recorder.subscribe("loader", self._loader)
        recorder.subscribe("stretch", self._turn)

    def stop(self) -> None:
        """Take the clocks away; workers that go on take theirs away themselves."""
        self._fetches.restore()
        self._patches.restore()
        for watched in self._watched:
            if watched is not self._handed:
                for board in watched.boards:
                    board.close()

    def loader_of(self, iterator: Any) -> Any:
        """Return the loader that an iterator is over; None where that is not known, or gone."""
        watched = self._iterators.get(iterator)
        return None if watched is None or watched.ref is None else watched.ref()

    def hand_over(self, iterator: Any) -> _Watched | None:
        """Return the observations of an iterator's loader so far. Another watch goes on with them: its workers are heard on."""
        handed = self._handed = self._iterators.get(iterator)
        if handed is not None and handed.iterators == 1:  # it was asked by nobody else
            self._watched.remove(handed)
        return handed

    def take_over(self, iterator: Any, watched: _Watched) -> None:
        """Go on with the observations of an iterator's loader."""
        self._iterators[iterator] = self._add(watched)

    def observe(self) -> tuple[LoaderFacts, ...]:
        """Return the loaders that were asked for batches."""
        return tuple(watched.facts_of_use() for watched in self._watched if watched.iterators)

    def loader(self) -> Any | None:
        """Return the loader of the training batches itself: torch's or a Learner's; None if it is gone, or there was none."""
        training = [watched for watched in self._watched if watched.facts.is_training and watched.ref is not None]
        busiest = max(training, key=lambda watched: watched.part().fetches, default=None)
        loader = busiest.ref() if busiest is not None and busiest.ref is not None else None
        is_learners = busiest is not None and busiest.facts.is_learners
        return attribute_of(loader, "d") if is_learners else loader

    # --- on the thread of the fit, as iterators begin ---------------------------------------------------------------------

    def _init(self, original: Function) -> Function:
        recorder = self._recorder

        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807 - it stands in for it
            __tracebackhide__ = True
            if get_ident() == recorder.thread and os.getpid() == self._pid:
                recorder.attempt(self, "the start of an iterator", self._begins, iterator, loader)
            original(iterator, loader)

        return __init__

    def _init_with_workers(self, original: Function) -> Function:
        def __init__(iterator: Any, loader: Any) -> None:  # noqa: N807 - it calls the other one, and starts workers then
            __tracebackhide__ = True
            try:
                original(iterator, loader)
            finally:
                self._starts.restore()

        return __init__

    def _time_fetches(self) -> None:
        """Put clocks around the fetches of this process."""
        from torch.utils.data._utils import fetch

        self._fetches.restore()
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            self._fetches.put(fetcher, "fetch", self._fetch)

    def _turn(self, begins: bool) -> None:
        """Time fetches while all batches are sampled, which tells the cost of a fetch."""
        if begins:
            self._time_fetches()
        else:
            self._fetches.restore()

    def _begins(self, iterator: Any, loader: Any) -> None:
        watched = self._of(loader)
        self._iterators[iterator] = watched
        self._begun[iterator] = self._recorder.clock()
        workers = worker_count(loader)
        if workers:
            from torch.utils.data._utils import worker

            board = watched.new_board(workers)
            self._starts.put(worker, "_worker_loop", lambda loop: TimedLoop(loop, board, self._fetches))

    def _of(self, loader: Any) -> _Watched:
        for watched in self._watched:
            if watched.ref is not None and watched.ref() is loader:
                return watched
        return self._add(_Watched(weakref.ref(loader)))

    def _add(self, watched: _Watched) -> _Watched:
        if len(self._watched) < _LOADERS:
            self._watched.append(watched)
        return watched

    def _loader(self, iterator: Any) -> None:
        watched = self._iterators.get(iterator)
        if watched is None:
            watched = self._add(_Watched(None))
            if worker_count(iterator):
                watched.note = "not known: the workers were started before the profile"
        watched.iterators += 1
        loader = watched.ref() if watched.ref is not None else None
        watched.facts = replace(facts_of_iterator(iterator, loader), is_training=watched.facts.is_training)
        fetcher = attribute_of(iterator, "_dataset_fetcher")
        if fetcher is not None:
            self._counters[fetcher] = watched.timer
            self._current = weakref.ref(fetcher), watched.timer
        self._fresh = watched
        self._recorder.subscribe("end", self._settle)
        self._recorder.subscribe("backward", self._backward)
        begun = self._begun.get(iterator)
        if begun is not None:
            self._awaited = watched, begun
            self._recorder.subscribe("waited", self._waited)

    def _waited(self) -> None:
        if self._awaited is not None:
            watched, begun = self._awaited
            watched.starts.append(self._recorder.clock() - begun)
        self._awaited = None
        self._recorder.unsubscribe("waited", self._waited)

    def _backward(self) -> None:
        watched = self._fresh
        if watched is not None:
            watched.facts = replace(watched.facts, is_training=True)
        self._settle()

    def _settle(self) -> None:
        """Listen no more: the purpose of the loader is known."""
        self._fresh = None
        self._recorder.unsubscribe("end", self._settle)
        self._recorder.unsubscribe("backward", self._backward)

    # --- around fetches in the fit's process -------------------------------------------------------------------------------

    def _fetch(self, original: Function) -> Function:
        recorder = self._recorder

        def fetch(fetcher: Any, index: Any) -> Any:
            __tracebackhide__ = True
            if get_ident() != recorder.thread:  # a worker's neither
                return original(fetcher, index)
            known, timer = self._current
            if known() is not fetcher:
                timer = recorder.attempt(self, "a fetch", self._timer_of, fetcher)
            if timer is None:
                return original(fetcher, index)
            batch, is_disturbed = timer.fetch(original, fetcher, index, recorder.turn)
            if is_disturbed:
                recorder.boundary("disturbed")
            return batch

        return fetch

    def _timer_of(self, fetcher: Any) -> FetchTimer | None:
        timer = self._counters.get(fetcher)
        self._current = weakref.ref(fetcher), timer
        return timer


# --- One loader with other numbers of workers, in a process that was forked for it.


_SLOW = 10**9  # ns that workers may take to start one after the other
_DEPTH = 6  # most levels of a dataset that are searched
_OBJECTS = 20_000
_SHARED_STATE = {
    ("h5py", "File"): "an open HDF5 file",
    ("h5py", "Dataset"): "an open HDF5 file",
    ("h5py", "Group"): "an open HDF5 file",
    ("sqlite3", "Connection"): "an open SQLite connection",
    ("lmdb", "Environment"): "an open LMDB environment",
    ("builtins", "Environment"): "an open LMDB environment",
    ("socket", "socket"): "an open socket",
    ("_io", "BufferedReader"): "an open file",
    ("_io", "TextIOWrapper"): "an open file",
    ("_io", "FileIO"): "an open file",
}
"""Things that a forked process shares with this one: a place in a file, a lock. By module and name of the type."""


def reason_against(loader: Any | None) -> str:
    """Return why a loader's workers cannot be tried without touching the user's objects; empty if they can."""
    if loader is None:
        return "the loader of the training batches is gone, or was made before the profile"
    if sys.platform != "linux":
        return "trials need a process that is forked, which is safe on Linux only"
    attributes = attributes_of(loader) or {}
    dataset = attributes.get("dataset")
    if attributes.get("indexed") is False or any("IterableDataset" in base.__name__ for base in type(dataset).__mro__):
        return "its dataset is a stream, which trials could use up"
    return next((f"the dataset holds {what}" for what in _unsafe(dataset)), "")


def _unsafe(dataset: Any) -> Iterator[str]:
    """Yield the objects in a dataset that a forked process cannot use, or would share with this one."""
    torch = sys.modules["torch"]
    todo, visited = [(dataset, 0)], set[int]()
    while todo and len(visited) < _OBJECTS:
        obj, depth = todo.pop()
        cls = type(obj)
        if id(obj) in visited:
            continue
        visited.add(id(obj))
        shared = _SHARED_STATE.get((cls.__module__.split(".")[0], cls.__name__))
        if shared:
            yield f"{shared} ({cls.__name__}): worker processes must open their own"
        elif issubclass(cls, torch.Tensor):
            if torch.Tensor.is_cuda.__get__(obj):
                yield "tensors on the GPU: worker processes cannot use them"
        elif depth < _DEPTH:
            inside = obj if cls in (list, tuple) else obj.values() if cls is dict else (attributes_of(obj) or {}).values()
            todo += [(item, depth + 1) for item in list(inside)[:1000]]


def serve(connection: Any, loader: Any, seconds: float) -> None:
    """Answer each number of workers by (ns per batch, ns until the first, bytes of a batch, note), or the error."""
    os.setpgid(0, 0)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    import torch

    torch.set_num_threads(1)  # its threads did not survive the fork
    while (workers := connection.recv()) is not None:
        try:
            connection.send(_trial(loader, workers, seconds))
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises is an answer
            connection.send(f"{type(error).__name__}: {error}"[:300])
        gc.collect()  # ends the workers of this trial


def _trial(loader: Any, workers: int, seconds: float) -> tuple[int, int, int, str]:
    limit = seconds * 1e9
    warm_up = max(2, 2 * workers)  # batches that the workers have made ahead, or still make for the first time
    count = measured = spent = total = first = nbytes = 0
    for place, duration, batch in _batches(with_workers(loader, workers)):
        count, total = count + 1, total + duration
        if count == 1:
            first, nbytes = duration, _nbytes(batch)
        if place > warm_up or (place > 1 and total - first > limit + _SLOW):
            measured, spent = measured + 1, spent + duration
        if spent > limit or total - first > 2 * (limit + _SLOW):
            break
    if measured:
        return spent // measured, first, nbytes, ""
    return total // count, first, nbytes, "whole epochs, with the start of their workers"


def _batches(loader: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield (its place in the epoch, nanoseconds, batch) of batches of one epoch after the other."""
    while True:
        place, begin = 0, time.perf_counter_ns()
        for place, batch in enumerate(loader, 1):
            now = time.perf_counter_ns()
            yield place, now - begin, batch
            begin = time.perf_counter_ns()
        if not place:
            raise ValueError("the loader gives no batch")


def with_workers(loader: Any, workers: int) -> Any:
    """Return a loader like this one, with other workers, whose batches stay where they are made."""
    if "fake_l" in (attributes_of(loader) or {}):
        for name in ("_n_inp", "_types"):  # else a batch is made to know them, on the device; they are for showing only
            vars(loader).setdefault(name, None)
        return loader.new(num_workers=workers, pin_memory=False, device=None, after_batch=None)
    from torch.utils.data import DataLoader

    how = {name: getattr(loader, name) for name in ("collate_fn", "worker_init_fn", "generator")}
    if workers:
        how |= {"multiprocessing_context": loader.multiprocessing_context, "prefetch_factor": loader.prefetch_factor or 2}
    if loader.batch_sampler is not None:
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=workers, **how)
    return DataLoader(loader.dataset, batch_size=None, sampler=loader.sampler, num_workers=workers, **how)


def _nbytes(batch: Any) -> int:
    """Return the bytes of a batch's tensors."""
    import torch

    if isinstance(batch, torch.Tensor):
        return int(batch.numel()) * int(batch.element_size())
    inside = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return sum(map(_nbytes, inside))


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
