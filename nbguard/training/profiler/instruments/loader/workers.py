"""The fetches of worker processes: each worker is given a board when it starts, and writes the cost of its fetches there.

The board is memory that the worker shares with the fit, whether it is forked, spawned or started by a fork server: no queue,
nothing to wait for, and the fit reads it when it likes.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from multiprocessing.sharedctypes import RawArray
from typing import Any

from nbguard.training.profiler.analysis.loader.slowest import FetchFunction, FetchStep
from nbguard.training.profiler.instruments.loader.fetching import RING, Fetch, FetchSamples, FetchTimer
from nbguard.training.profiler.instruments.loader.loader_facts import CopiedMemory
from nbguard.training.profiler.record.patches import Patches

Loop = Callable[..., None]

_HEADER = struct.Struct("<16q")
"""Fetches, items, profiled, their ns, metered, bytes read, from storage, ns blocked, ns run, of JSON, times written, copied,
batches sized, their bytes, ns in files, ns of decoding."""
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
        size = _HEADER.unpack_from(memory, at)[9]
        if steps:
            text = _written(steps)
            memory[at + _TEXT : at + _TEXT + len(text)] = text
            size = len(text)
        header = (
            timer.fetches,
            timer.items,
            *timer.here,
            *timer.read,
            size,
            timer.written,
            copied,
            *timer.sized,
            *timer.file_work,
        )
        _HEADER.pack_into(memory, at, *header)

    def read(self) -> Iterator[FetchSamples]:
        """Yield the samples that each worker has written."""
        for slot in range(1, self._slots + 1):
            memory, at = self._memory, _SLOT * slot
            figures = _HEADER.unpack_from(memory, at)
            fetches, items, profiled, profiled_time, metered, read, stored, blocked, ran, size, written = figures[:11]
            copied, sized, nbytes, in_files, decoding = figures[11:]
            places = range(at + _HEADER.size, at + _HEADER.size + min(written, RING) * _NUMBER.size, _NUMBER.size)
            times = tuple(_NUMBER.unpack_from(memory, place)[0] for place in places)
            yield FetchSamples(
                fetches=fetches,
                items=items,
                times=times,
                profiled=profiled,
                profiled_time=profiled_time,
                metered=metered,
                read=read,
                stored=stored,
                blocked=blocked,
                ran=ran,
                sized=sized,
                nbytes=nbytes,
                in_files=in_files,
                decoding=decoding,
                steps=_read(memory[at + _TEXT : at + _TEXT + size]),
                copied=copied,
            )


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
