"""The bytes that a thread has read from files, and how long it was blocked, as Linux counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import perf_counter_ns

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
