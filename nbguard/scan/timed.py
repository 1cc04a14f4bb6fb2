"""A scan together with the moment at which it was made, for whoever may use it instead of a scan of their own."""

from __future__ import annotations

import time
from dataclasses import dataclass

from nbguard.scan.scan import Notebook, Scan, scan


@dataclass(frozen=True, kw_only=True)
class TimedScan(Scan):
    """A scan that says how old it is. Like any scan it refers to objects of the user's weakly or by id only."""

    since: float  # seconds since the epoch, when it began
    seconds: float  # that it took
    is_beside: bool  # made while code of the user's ran in another thread


def timed_scan(notebook: Notebook) -> TimedScan:
    """Scan the process once, as `scan` does, and note when that was. Raises NoTorchError if PyTorch is not imported."""
    since, start = time.time(), time.perf_counter()
    made = scan(notebook)
    return TimedScan(
        facts=made.facts,
        tracker=made.tracker,
        since=since,
        seconds=time.perf_counter() - start,
        is_beside=notebook.is_running,
    )
