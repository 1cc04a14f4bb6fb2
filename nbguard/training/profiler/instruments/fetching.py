"""The cost of fetches in one process, the fit's own or a worker's, with a time and read bytes per fetch, and a profile.

Nothing is fetched for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import parent_process
from statistics import median_low
from time import perf_counter_ns
from typing import Any, NamedTuple

from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.libraries import library_paths
from nbguard.training.profiler.analysis.slowest import (
    FetchCall,
    FetchFacts,
    FetchFunction,
    FetchProfile,
    FetchStep,
    file_work,
    steps,
)
from nbguard.training.profiler.record.log import Turn

# --- The bytes that a thread has read from files, and how long it was blocked, as Linux counts them.


_COUNTERS = "/proc/thread-self/io"
"""`rchar`: bytes that calls of read() returned; `read_bytes`: bytes that storage devices were asked for. See proc_pid_io(5)."""

_TURNS = "/proc/thread-self/schedstat"
"""Nanoseconds on a processor, nanoseconds waiting for one, and turns."""


@dataclass(frozen=True, slots=True)
class BytesRead:
    """Bytes that have been read from files."""

    calls: int = 0  # by calls of read(), from the page cache or from storage
    storage: int = 0  # from storage devices, for pages that are mapped, too
    blocked: int = field(default=0, compare=False)  # nanoseconds of the thread neither running nor waiting for a processor
    ran: int = field(default=0, compare=False)  # nanoseconds on a processor


class ReadMeter:
    """Measures the bytes that this thread reads between two moments, in some 40 microseconds each."""

    def __init__(self) -> None:
        self._turns = _turns()
        self._before = _counters()

    def stop(self) -> BytesRead | None:
        """Return the reads since it was made, or None where the system does not count them."""
        after = _counters()
        if self._before is None or after is None:
            return None
        before, own = self._before
        blocked, ran = (max(0, now - then) for now, then in zip(_turns(), self._turns, strict=True))
        calls, storage = after[0].calls - before.calls - own, after[0].storage - before.storage
        return BytesRead(calls=calls, storage=storage, blocked=blocked, ran=ran)


def _turns() -> tuple[int, int]:
    """Return the nanoseconds, from some moment on, that this thread was blocked, and those on a processor."""
    try:
        file = os.open(_TURNS, os.O_RDONLY)
        try:
            ran, waited, _ = map(int, os.read(file, 64).split())
        finally:
            os.close(file)
        return perf_counter_ns() - ran - waited, ran
    except (OSError, ValueError):
        return 0, 0


def _counters() -> tuple[BytesRead, int] | None:
    """Return the counters and how many bytes reading them has read itself; None where there are none."""
    try:
        file = os.open(_COUNTERS, os.O_RDONLY)
        try:
            text = os.read(file, 4096)
        finally:
            os.close(file)
        values = dict(line.split(b": ") for line in text.splitlines())
        return BytesRead(int(values[b"rchar"]), int(values[b"read_bytes"])), len(text)
    except (OSError, KeyError, ValueError):
        return None


Fetch = Callable[[Any, Any], Any]

_EVERY = 8  # fetches between two that are profiled, after the first ones
_AT_FIRST = 3  # fetches that are profiled one after the other
_ENOUGH = 4  # profiled fetches, if together they took long enough to tell
_MOST = 6
_TELLING = 5_000_000  # ns

_COUNTS_ALL_THREADS = sys.version_info >= (3, 12)
"""Since then a profiler takes the calls of all threads for calls of one, and loses its place."""
_RESTING = ("wait", "accept")  # functions of the threads that hand a worker's batches over
_HANDING_OVER = ("multiprocessing/queues.py", "multiprocessing/resource_sharer.py", "multiprocessing/connection.py")
_SAMPLER = "nbguard/training/profiler/instruments/stack_sampler.py"  # which looks from a thread of its own in the fit's process
_QUIET = 3  # looks one after the other at which all of them rest
_TO_REST = 0.03  # seconds that they have

RING = 64
"""Times of fetches that are kept: the latest."""
_STEPS = 12  # of a profile are kept
_KEPT = 4096  # times of fetches of one loader


class FetchTimer:
    """Times the fetches of one loader in this process. Holds no object of the user's."""

    def __init__(self, before: FetchSamples | None = None) -> None:
        """`before`: samples of the same loader's earlier fetches: there may be no need to profile more."""
        self.fetches = self.items = 0
        self.times: deque[int] = deque(maxlen=RING)
        self.written: int = 0
        self.profiled, self.profiled_time = (before.counts.profiled, before.counts.profiled_time) if before else (0, 0)
        self._durations: list[int] = []  # of those profiled here
        self._read: list[BytesRead] = []  # by these, where the system counts it
        self._file_work: list[tuple[int, int]] = []  # nanoseconds of reading from files, and of decoding
        self.sized: tuple[int, int] = 0, 0  # batches whose bytes were counted, and these
        self._raw: list[Sequence[Any]] = []  # counts of their profiles, not read yet: that takes longer than a fetch
        self._profiles: list[tuple[FetchStep, ...]] = []  # where their time went
        self.failed: str = ""
        self._mixed = 0  # profiles that had calls of other threads in them
        self._next = 0 if before and before.counts.fetches else 1  # the first of all does things that are done only once
        self._profiler: Any = None
        self._turn: Turn | None = None  # that the fetch has which is profiled

    def fetch(self, original: Fetch, fetcher: Any, index: Any, turn: Turn | None = None) -> tuple[Any, bool]:
        """Return the batch of a fetch, and whether it was profiled; `turn`: of the threads that run beside it."""
        __tracebackhide__ = True
        if self.fetches >= self._next and self._begin_profile(turn):
            return self._profiled(original, fetcher, index), True
        begin = perf_counter_ns()
        batch = original(fetcher, index)
        self.times.append(perf_counter_ns() - begin)
        self.written += 1
        self._count(index)
        return batch, False

    def _count(self, index: Any) -> None:
        self.fetches += 1
        if type(index) is list or type(index) is tuple:
            self.items += len(index)

    def _begin_profile(self, turn: Turn | None) -> bool:
        """Profile from here, if one more fetch is to be and can be: Python has one profiler per thread."""
        if self.profiled >= _MOST or (self.profiled >= _ENOUGH and self.profiled_time >= _TELLING):
            self._next = sys.maxsize
            return False
        if sys.getprofile() is not None:
            return False
        self._turn = turn if _COUNTS_ALL_THREADS else None
        if self._turn is not None and not self._turn.begin():
            return False
        import _lsprof

        self._next = self.fetches + (1 if len(self._durations) < _AT_FIRST - 1 else _EVERY)
        self._profiler = self._profiler or _lsprof.Profiler()
        self._meter = ReadMeter()
        if _COUNTS_ALL_THREADS and parent_process() is not None:  # only workers hand batches over
            _wait_for_others()
        try:
            self._profiler.enable()
        except ValueError as error:  # from Python 3.12 on: another tool has the place
            self._end_turn()
            self._next = sys.maxsize
            self.failed = f"not known: another profiler runs ({error})"
            return False
        return True

    def _profiled(self, original: Fetch, fetcher: Any, index: Any) -> Any:
        __tracebackhide__ = True
        begin = perf_counter_ns()
        try:
            batch = original(fetcher, index)
            duration = perf_counter_ns() - begin
        finally:
            self._profiler.disable()
            self._end_turn()
        self._count(index)
        try:
            self.sized = self.sized[0] + 1, self.sized[1] + _nbytes(batch)
            self._keep_profile(duration, self._meter.stop())
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not cost the user's batch
            self._next = sys.maxsize
            self.failed = f"not known: reading a profile failed ({type(error).__name__}: {error})"
        return batch

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()

    def _keep_profile(self, duration: int, read: BytesRead | None) -> None:
        """Keep the profile of a fetch that took `duration` nanoseconds, unless calls of other threads are in it."""
        if read is not None:
            self._read.append(read)
        counted = self._profiler.getstats()
        self._profiler.clear()
        if _COUNTS_ALL_THREADS and any(map(_is_of_another_thread, counted)):
            self._mixed += 1
            if self._mixed >= _MOST:
                self._next = sys.maxsize
                self.failed = "not known: other threads ran in each fetch that was profiled"
            return
        self.profiled, self.profiled_time = self.profiled + 1, self.profiled_time + duration
        self._durations.append(duration)
        self._raw.append(counted)

    @property
    def here(self) -> tuple[int, int]:
        """Return the number of fetches profiled here, and their nanoseconds, as if all had taken the usual time."""
        count = len(self._durations)
        return count, count * median_low(self._durations) if count else 0

    @property
    def read(self) -> tuple[int, int, int, int, int]:
        """Return how many fetches' reading was measured here, their bytes, those from storage, ns blocked and ns at work."""
        parts = [(1, one.calls, one.storage, one.blocked, one.ran) for one in self._read]
        count, calls, storage, blocked, ran = map(sum, zip(*parts, strict=True)) if parts else (0,) * 5
        return count, calls, storage, blocked, ran

    def steps(self) -> tuple[FetchStep, ...]:
        """Return the steps of the profiled fetches, each with its usual time."""
        while self._raw:
            profile = _profile_of(self._raw.pop())
            self._profiles.append(steps(profile)[:_STEPS])
            self._file_work.append(file_work(profile))
        every = {step.function: step.kind for profile in self._profiles for step in profile}
        usual = []
        for function, kind in every.items():
            same = [next((step for step in profile if step.function == function), None) for profile in self._profiles]
            time = median_low([step.time if step else 0 for step in same])
            usual.append(FetchStep(function, kind, sum(step.calls for step in same if step), time * len(same)))
        return tuple(sorted(usual, key=lambda step: -step.time))

    @property
    def file_work(self) -> tuple[int, int]:
        """Return the nanoseconds of reading from files and of decoding, in the fetches that `steps` has read."""
        if not self._file_work:
            return 0, 0
        count = len(self._file_work)
        reading, decoding = (count * median_low(times) for times in zip(*self._file_work, strict=True))
        return reading, decoding

    def part(self) -> FetchSamples:
        """Return the samples of this process."""
        found = self.steps()
        return FetchSamples(counts=self.counts, times=tuple(self.times), steps=found, note=self.failed)

    @property
    def counts(self) -> FetchCounts:
        """Return the counts of this process; of reading and decoding as far as `steps` has read them."""
        return FetchCounts(self.fetches, self.items, *self.here, *self.read, *self.sized, *self.file_work)


def _nbytes(batch: Any, depth: int = 4) -> int:
    """Return the bytes of the tensors in a batch: a tensor, or tuples, lists and dictionaries of them."""
    torch: Any = sys.modules["torch"]
    kinds = mro_of(type(batch))
    if torch.Tensor in kinds:
        with torch._C.DisableTorchFunctionSubclass():
            return int(batch.numel() * batch.element_size())
    if depth and (tuple in kinds or list in kinds):
        base: Any = tuple if tuple in kinds else list
        return sum(_nbytes(part, depth - 1) for part in base.__iter__(batch))
    if depth and dict in kinds:
        return sum(_nbytes(part, depth - 1) for part in dict.values(batch))
    return 0


def _is_of_another_thread(entry: Any) -> bool:
    """Say whether an entry of a profile is of the thread that hands a worker's batches over, or that looks at stacks."""
    return type(entry.code) is not str and entry.code.co_filename.endswith((*_HANDING_OVER, _SAMPLER))


def _wait_for_others() -> None:
    """Return once the threads rest that hand the last batch over; or soon."""
    quiet, end = 0, time.perf_counter() + _TO_REST
    while quiet < _QUIET and time.perf_counter() < end:
        time.sleep(_TO_REST / 60)
        tops = sys._current_frames()
        del tops[threading.get_ident()]
        quiet = quiet + 1 if all(top.f_code.co_name in _RESTING for top in tops.values()) else 0


class FetchCounts(NamedTuple):
    """Counts of fetches that add up over processes, times in nanoseconds."""

    fetches: int = 0  # batches made
    items: int = 0  # items in them, where their number is known
    profiled: int = 0  # fetches that were profiled
    profiled_time: int = 0  # of these together
    metered: int = 0  # fetches whose reading from files was measured
    read: int = 0  # bytes that these got by calls of read()
    stored: int = 0  # bytes that storage devices were asked for meanwhile
    blocked: int = 0  # nanoseconds that they waited for a device or a lock, not for a processor
    ran: int = 0  # nanoseconds that they ran
    sized: int = 0  # batches whose bytes were counted
    nbytes: int = 0  # of these together
    in_files: int = 0  # nanoseconds of profiled fetches spent reading from files
    decoding: int = 0  # and decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSamples:
    """The fetches of one process, or of several."""

    counts: FetchCounts = field(default_factory=FetchCounts)
    times: tuple[int, ...] = ()  # nanoseconds of the latest fetches that were not profiled
    steps: tuple[FetchStep, ...] = ()  # functions that they spent it in
    note: str = ""  # the reason why none was profiled
    copied: int = 0  # bytes that a worker has copied of memory that it shared; of one process only


def together(samples: Sequence[FetchSamples]) -> FetchSamples:
    """Return several processes' parts as one."""
    sums: dict[FetchFunction, list[Any]] = {}
    for step in (step for part in samples for step in part.steps):
        total = sums.setdefault(step.function, [step.kind, 0, 0])
        total[1:] = total[1] + step.calls, total[2] + step.time
    merged = (FetchStep(function, *total) for function, total in sums.items())
    return FetchSamples(
        counts=FetchCounts(*map(sum, zip(*(part.counts for part in samples), strict=True))),
        times=tuple(duration for part in samples for duration in part.times)[-_KEPT:],
        steps=tuple(sorted(merged, key=lambda step: -step.time)),
        note=next((part.note for part in samples if part.note), ""),
    )


def facts_of(part: FetchSamples) -> FetchFacts:
    """Return the facts on a loader's fetches for the report."""
    times = sorted(part.times) if len(part.times) > 2 else []
    median, p95 = (times[len(times) // 2], times[len(times) * 95 // 100]) if times else (None, None)
    counts = part.counts._asdict()
    sized, nbytes = counts.pop("sized"), counts.pop("nbytes")
    return FetchFacts(
        **counts, median=median, p95=p95, nbytes=nbytes // sized if sized else 0, steps=part.steps, note=part.note
    )


def _profile_of(entries: Sequence[Any]) -> FetchProfile:
    """Return the call graph that `_lsprof` has counted."""
    libraries = (*library_paths(), "<frozen")
    numbers = {id(entry.code) if type(entry.code) is not str else entry.code: i for i, entry in enumerate(entries)}
    calls = {}
    for number, entry in enumerate(entries):
        callees = []
        for sub in entry.calls or ():
            callee = numbers.get(id(sub.code) if type(sub.code) is not str else sub.code)
            if callee is not None:
                callees.append(FetchCall(callee, sub.callcount, round(sub.totaltime * 1e9), round(sub.inlinetime * 1e9)))
        calls[number] = tuple(callees)
    functions = tuple(_function(entry.code, libraries) for entry in entries)
    return FetchProfile(
        functions, calls, tuple(e.callcount for e in entries), tuple(round(e.inlinetime * 1e9) for e in entries)
    )


def _function(code: Any, libraries: tuple[str, ...]) -> FetchFunction:
    if type(code) is str:
        return FetchFunction(name=code, file="", line=0, is_users=False)
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 does not know it
    return FetchFunction(
        name=name, file=code.co_filename, line=code.co_firstlineno, is_users=not code.co_filename.startswith(libraries)
    )
