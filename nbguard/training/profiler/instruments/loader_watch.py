"""Watches a fit's loaders, with their settings, the cost of their fetches and the function that costs most."""

from __future__ import annotations

import ctypes
import json
import linecache
import multiprocessing
import os
import struct
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from multiprocessing.sharedctypes import RawArray
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import attribute_of, mro_of, namespace_of
from nbguard.memory.scan.learners import worker_count
from nbguard.training.profiler.analysis.slowest import FetchFunction, FetchStep, LoaderFacts, PythonRows
from nbguard.training.profiler.instruments.fetching import (
    RING,
    Fetch,
    FetchCounts,
    FetchSamples,
    FetchTimer,
    facts_of,
    together,
)
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder

# --- A loader as it is set up, and the memory that a forked worker of it has copied


def facts_of_iterator(iterator: Any, loader: Any | None) -> LoaderFacts:
    """Return how a loader is set up, from torch's iterator over it and, where it is known, torch's loader."""
    attribute = partial(attribute_of, iterator)
    dataset, is_iterable = attribute("_dataset"), getattr(attribute("_dataset_kind"), "real", 0) == 1
    batch_size = attribute_of(loader, "batch_size") or attribute_of(attribute_of(loader, "batch_sampler"), "batch_size")
    learners = attribute_of(dataset, "d") if type(dataset).__name__ == "_FakeLoader" else None
    if learners is not None:  # torch sees an iterable stand-in; the Learner's loader is behind it
        inner = partial(attribute_of, learners)
        dataset, is_iterable, batch_size = inner("dataset"), not inner("indexed"), inner("bs")
    workers = attribute("_num_workers")
    return LoaderFacts(
        dataset=type(dataset).__name__,
        is_learners=learners is not None,
        is_iterable=is_iterable,
        workers=workers if type(workers) is int else 0,
        batch_size=batch_size if type(batch_size) is int else None,
        pin_memory=attribute("_pin_memory") is True or attribute_of(loader, "pin_memory") is True,
        persistent=attribute("_persistent_workers") is True,
        prefetch=attribute("_prefetch_factor"),
        in_order=attribute("_in_order"),
        start_method=_start_method(attribute("_workers")),
        rows=python_rows(dataset) if workers else None,
    )


def _start_method(workers: Any) -> str | None:
    """Return how worker processes were started: as their own kind says, or as is usual here."""
    if type(workers) is not list or not workers:
        return None
    own = getattr(type(workers[0]), "_start_method", None)
    return own or multiprocessing.get_start_method(allow_none=True)


def shown(step: FetchStep) -> FetchStep:
    """Return a step with its file as it is shown: a cell, or the file's name; and with its class, where Python did not say."""
    function = step.function
    place = Sites().place(function.file)
    return replace(step, function=replace(function, name=_qualified(function), file=place))


def _qualified(function: FetchFunction) -> str:
    """Return the name with its class. Python 3.10 does not tell it: there it is the class whose body the line is in."""
    if "." in function.name:
        return function.name
    lines = linecache.getlines(function.file)[: function.line]
    indent = _indent(lines[-1]) if lines else 0
    for line in reversed(lines):
        if line.strip() and _indent(line) < indent:
            words = line.replace("(", " ").replace(":", " ").split()
            return f"{words[1]}.{function.name}" if words[:1] == ["class"] else function.name
    return function.name


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_ROLLUP = "/proc/self/smaps_rollup"
"""See proc_pid_smaps(5). `Private_Dirty`: written by this process, and mapped by no other; `Anonymous`: of no file."""
_SELDOM = 100
"""Pause until the next scan in multiples of its length, so that scans take 1 % of a worker's time at most."""
_MANY = 10_000
"""Least objects of a container that is mentioned."""
_CONTAINERS = (list, tuple, dict, set, frozenset)
_WRAPPERS = ("dataset", "datasets")
"""Attributes of PyTorch's data sets, such as `Subset`, that have the one they are of."""
_DEPTH = 4


class CopiedMemory:
    """Measures, in a worker, the memory that it shared with the fit when it began and has copied since then."""

    def __init__(self) -> None:
        self._next = 0.0  # moment of the next scan
        self._first: tuple[int, int] | None = None
        self.nbytes: int = 0  # copied at the last scan

    def look(self) -> None:
        """Look, unless the last time was just now."""
        begin = perf_counter()
        if begin < self._next:
            return
        now = _private_and_all()
        end = perf_counter()
        self._next = end + _SELDOM * (end - begin) if now is not None else float("inf")
        if now is not None:
            self._first = self._first or now
            private, whole = now[0] - self._first[0], now[1] - self._first[1]
            self.nbytes = max(0, private - max(0, whole))  # new objects were never shared


def _private_and_all() -> tuple[int, int] | None:
    """Return the bytes that only this process has, and all of its own; None where the system does not say."""
    try:
        with open(_ROLLUP, "rb") as file:  # noqa: PTH123 - as quick as can be
            lines = file.read().splitlines()[1:]
        sizes = {line.partition(b":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return sizes[b"Private_Dirty"] - sizes.get(b"Pss_Shmem", 0), sizes[b"Anonymous"]
    except (OSError, KeyError, ValueError, IndexError):
        return None


def python_rows(dataset: Any) -> PythonRows | None:
    """Return the largest container of Python objects that a data set has as an attribute; None where none is large."""
    found = max(_rows_of(dataset, "", _DEPTH), key=lambda rows: rows.count, default=None)
    return found if found is not None and found.count >= _MANY else None


def _rows_of(dataset: Any, path: str, depth: int) -> Iterator[PythonRows]:
    for name in _names_of(type(dataset)):
        value = attribute_of(dataset, name)
        if name in _WRAPPERS and depth and value is not None:
            places = {f"{path}{name}[{i}]": each for i, each in enumerate(value[:_DEPTH])} if type(value) is list else {}
            for place, each in (places or {f"{path}{name}": value}).items():
                yield from _rows_of(each, f"{place}.", depth - 1)
        elif type(value) in _CONTAINERS:
            yield PythonRows(f"{path}{name}", type(value).__name__, len(value))


def _names_of(cls: type) -> set[str]:
    """Return the names that methods of a class use: its attributes are among them, which are not listed without a cost."""
    functions = (each for base in mro_of(cls) for each in list(namespace_of(base).values()))
    return {name for each in functions if type(each) is types.FunctionType for name in each.__code__.co_names}


# --- The fetches of worker processes: each worker is given a board when it starts, and writes the cost of its fetches there.
#
# The board is memory that the worker shares with the fit, whether it is forked, spawned or started by a fork server: no queue,
# nothing to wait for, and the fit reads it when it likes.


Loop = Callable[..., None]

_COUNTS = len(FetchCounts._fields)
_HEADER = struct.Struct(f"<{_COUNTS + 3}q")
"""The counts, and then the bytes of JSON, the times written, and the bytes copied."""
_NUMBER = struct.Struct("<q")
_SLOT = 4096
_TEXT = _HEADER.size + RING * _NUMBER.size
_SLOTS = 64  # workers of one iterator that can be heard
_CLOSED = b"\1"


class WorkerBoard:
    """Memory that the workers of one iterator write to and the fit reads: a slot for each."""

    def __init__(self, workers: int, before: FetchSamples) -> None:
        """`before`: samples of the loader's earlier fetches."""
        self.before = before
        self._slots = min(workers, _SLOTS)
        self._memory: Any = RawArray(ctypes.c_char, _SLOT * (self._slots + 1))  # can be sent to a process that starts

    def close(self) -> None:
        """Tell the workers that nobody reads any more."""
        self._memory[:1] = _CLOSED

    @property
    def is_closed(self) -> bool:
        """Say whether the fit stopped reading."""
        return bool(self._memory[:1] == _CLOSED)

    def has(self, worker: int) -> bool:
        """Say whether the worker has a slot."""
        return worker < self._slots

    def write(self, worker: int, timer: FetchTimer, steps: Sequence[FetchStep] = (), copied: int = 0) -> None:
        """Write the cost of a worker's fetches so far, and the bytes it has copied; called in the worker, after each."""
        memory, at = self._memory, _SLOT * (worker + 1)
        if timer.written:
            last = (timer.written - 1) % RING
            _NUMBER.pack_into(memory, at + _HEADER.size + last * _NUMBER.size, timer.times[-1])
        size = _HEADER.unpack_from(memory, at)[_COUNTS]
        if steps:
            text = _written(steps)
            memory[at + _TEXT : at + _TEXT + len(text)] = text
            size = len(text)
        _HEADER.pack_into(memory, at, *timer.counts, size, timer.written, copied)

    def read(self) -> Iterator[FetchSamples]:
        """Yield the samples that each worker has written."""
        for slot in range(1, self._slots + 1):
            memory, at = self._memory, _SLOT * slot
            *counts, size, written, copied = _HEADER.unpack_from(memory, at)
            places = range(at + _HEADER.size, at + _HEADER.size + min(written, RING) * _NUMBER.size, _NUMBER.size)
            times = tuple(_NUMBER.unpack_from(memory, place)[0] for place in places)
            found = _read(memory[at + _TEXT : at + _TEXT + size])
            yield FetchSamples(counts=FetchCounts(*counts), times=times, steps=found, copied=copied)


def _written(steps: Sequence[FetchStep]) -> bytes:
    """Return steps as JSON: as many of them as a slot takes."""
    rows = [[*astuple(step.function), step.kind, step.calls, step.time] for step in steps]
    while len(text := json.dumps(rows).encode()) > _SLOT - _TEXT:
        rows.pop()
    return text


_FUNCTION = ("name", "file", "line", "is_users", "inner", "library")


def _read(text: bytes) -> tuple[FetchStep, ...]:
    try:
        return tuple(
            FetchStep(FetchFunction(**dict(zip(_FUNCTION, row, strict=False))), *row[len(_FUNCTION) :])
            for row in json.loads(text or b"[]")
        )
    except ValueError:  # the worker is writing it now
        return ()


class TimedLoop:
    """The loop of a worker process, PyTorch's, with a clock around its fetches. It can be sent to a process that starts."""

    def __init__(self, loop: Loop, board: WorkerBoard, inherited: Patches | None = None) -> None:
        """`inherited`: the clock of the fit's own process, which a worker that is forked has, too."""
        self._loop, self._board, self._inherited = loop, board, inherited or Patches()

    def __reduce__(self) -> tuple[Callable[[WorkerBoard], TimedLoop], tuple[WorkerBoard]]:
        """Return the means to make it in another process, where PyTorch's loop has not been replaced."""
        return _in_new_process, (self._board,)

    def __call__(self, *args: Any) -> None:
        """Run in the worker, until the fit wants no more batches."""
        from torch.utils.data._utils import fetch

        self._inherited.restore()
        clock = _Clock(self._board)
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            clock.patches.put(fetcher, "fetch", clock.around)
        self._loop(*args)


def _in_new_process(board: WorkerBoard) -> TimedLoop:
    from torch.utils.data._utils import worker

    return TimedLoop(worker._worker_loop, board)


class _Clock:
    """Times the fetches of this worker until the fit reads its board no more."""

    def __init__(self, board: WorkerBoard) -> None:
        self.patches = Patches()
        self._board, self._timer, self._copied = board, FetchTimer(board.before), CopiedMemory()

    def around(self, original: Fetch) -> Fetch:
        """Return `original` with the clock around it."""
        from torch.utils.data import get_worker_info

        def fetch(fetcher: Any, index: Any) -> Any:
            __tracebackhide__ = True
            board, info = self._board, get_worker_info()
            if board.is_closed or info is None or not board.has(info.id):
                self.patches.restore()
                return original(fetcher, index)
            batch, is_profiled = self._timer.fetch(original, fetcher, index)
            try:
                self._copied.look()
                board.write(info.id, self._timer, self._timer.steps() if is_profiled else (), self._copied.nbytes)
            except Exception:  # noqa: BLE001 - a mistake of ours must not cost the user's batch
                self.patches.restore()
            return batch

        return fetch


# --- The loaders of a fit.


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
        busiest = max(training, key=lambda watched: watched.part().counts.fetches, default=None)
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
