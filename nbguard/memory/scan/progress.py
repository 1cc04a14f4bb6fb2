"""The progress of work that takes long, reported in the same thread by a line that goes at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbguard.units import counted

_PATIENCE = 1.0
"""Seconds from the start of the work to the first report, and between two reports."""


class _Listener(threading.local):
    report: Callable[[str], None] | None = None
    since = 0.0  # time.perf_counter() of the start, or of the latest report


_listener = _Listener()


@contextmanager
def reported(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` with words such as `tracing batches of 64…`, once a second at most, while work goes on in this thread."""
    former, _listener.report, _listener.since = _listener.report, report, time.perf_counter()
    try:
        yield
    finally:
        _listener.report = former


def stage(words: str) -> None:
    """Report the current stage, if somebody listens in this thread and a report is due."""
    if _listener.report is not None and time.perf_counter() - _listener.since > _PATIENCE:
        _listener.since = time.perf_counter()
        _listener.report(f"nbguard is {words}…")


def report(objects: int) -> None:
    """Report the number of objects that a scan has visited."""
    if _listener.report is not None:
        stage(f"scanning: {counted(objects, 'object')}")
