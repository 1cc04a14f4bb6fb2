"""The progress of a scan: the number of objects visited so far, reported to whoever waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 1.0
"""Seconds from the start of a scan to its first report, and between two reports."""


class _Listener(threading.local):
    report: Callable[[int], None] | None = None
    since = 0.0  # time.perf_counter() of the start, or of the latest report


_listener = _Listener()


@contextmanager
def reported(report: Callable[[int], None]) -> Iterator[None]:
    """Call `report` with the number of visited objects once a second while a scan runs in this thread."""
    _listener.report, _listener.since = report, time.perf_counter()
    try:
        yield
    finally:
        _listener.report = None


def report(objects: int) -> None:
    """Report the number of visited objects, if somebody listens in this thread and a report is due."""
    if _listener.report is not None and time.perf_counter() - _listener.since > _PATIENCE:
        _listener.since = time.perf_counter()
        _listener.report(objects)
