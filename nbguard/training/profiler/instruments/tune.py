"""The time of a batch with other numbers of workers, measured on a copy of the loader, in a process of its own.

The process is forked after the fit: the trials change random generators, the dataset and its transforms only in the
copy. It is ended with all that it has started, so that a dataset that hangs costs no more than its time limit.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbguard.memory.scan.devices.host import usable_cores
from nbguard.memory.scan.heap.kinds import attributes_of
from nbguard.memory.scan.learners import worker_count
from nbguard.training.profiler.analysis.loader_verdict import WorkerTuning, candidates, choose, is_enough, workers_words
from nbguard.training.profiler.analysis.report import WorkerTrial
from nbguard.training.profiler.analysis.slowest import StoragePace
from nbguard.training.profiler.checks.switches import unwarned
from nbguard.units import format_bytes

# --- The pace at which storage gives the files of a loader, by direct reads, past the page cache. Linux only.


_MOST = 4096
"""Files that are noted."""
_CODE = (".py", ".pyc", ".so")
"""Files that imports open."""
_PIECE = 2**20
"""Bytes of one read; each thread has one on its way."""


class OpenedFiles:
    """The regular files that this process has opened for reading since it was made.

    An audit hook cannot be taken off: make it only in a process that is about to end.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or len(self._paths) >= _MOST:
            return
        path, _, flags = arguments
        if type(path) is str and type(flags) is int and flags & os.O_ACCMODE == os.O_RDONLY and not path.endswith(_CODE):
            self._paths[path] = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that can still be read, in the order of their opening."""
        return tuple(path for path in [*self._paths] if Path(path).is_file())


def storage_pace(paths: Sequence[str], readers: int, seconds: float = 1.0) -> StoragePace | None:
    """Return the pace of direct reads of files, each at most once, or None where the system or the file system has none.

    Args:
        paths: of regular files.
        readers: threads that read at the same time.
        seconds: no further piece is read after that time.
    """
    if not hasattr(os, "O_DIRECT") or not paths:
        return None
    todo = iter(paths)
    began = time.perf_counter_ns()
    end = began + round(seconds * 1e9)
    with ThreadPoolExecutor(readers) as pool:
        read = [*pool.map(lambda _: _read(todo, end), range(readers))]
    nbytes, files = (sum(column) for column in zip(*read, strict=True))
    if not nbytes:
        return None
    elapsed = time.perf_counter_ns() - began
    return StoragePace(per_second=nbytes / elapsed * 1e9, nbytes=nbytes, files=files, readers=readers)


def _read(todo: Iterator[str], end: int) -> tuple[int, int]:
    """Return the bytes and files that one thread has read."""
    nbytes = files = 0
    with mmap.mmap(-1, _PIECE) as piece:  # direct reads need memory that begins with a page
        for path in todo:
            got = _read_file(path, piece, end)
            nbytes, files = nbytes + got, files + bool(got)
            if time.perf_counter_ns() > end:
                break
    return nbytes, files


def _read_file(path: str, piece: mmap.mmap, end: int) -> int:
    """Return the bytes of a file that were read, 0 where it cannot be read past the page cache."""
    nbytes = 0
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            while got := os.readv(file, [piece]):
                nbytes += got
                if got < _PIECE or time.perf_counter_ns() > end:
                    break
        finally:
            os.close(file)
    return nbytes


# --- Other numbers of workers.


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
    opened = OpenedFiles()
    while (workers := connection.recv()) is not None:
        try:
            connection.send(storage_pace(opened.paths, _READERS) if workers == _STORAGE else _trial(loader, workers, seconds))
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
_STORAGE = -1  # asks for the pace of storage instead of a number of workers
_READERS = 8  # files that are read at the same time for it
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
        pace = process.ask(_STORAGE) if trials else None
    best, sentence = choose(trials, current, step)
    storage = pace if type(pace) is StoragePace else None  # else a word on why there is none
    return WorkerTuning(tuple(trials), best, "; ".join(part for part in (sentence, trouble) if part), storage)


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
