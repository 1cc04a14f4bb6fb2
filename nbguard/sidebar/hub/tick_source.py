"""The source of ticks: counters, the fit that runs, the waiting jobs, and the starts of cells and epochs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from nbguard.memory.counters import TickReading
from nbguard.sidebar.hub.device_reader import DeviceReader
from nbguard.sidebar.hub.fit_progress import FitProgress
from nbguard.sidebar.hub.neighbours import Neighbours
from nbguard.sidebar.protocol.sparkline import Sparkline
from nbguard.sidebar.protocol.state import FitTick, JobStatus, Neighbour, Tick
from nbguard.sidebar.protocol.ticks import build_tick

Found = TypeVar("Found")

_GIVEN_UP = 5
"""Failures in a row after which a reading is tried no more."""

_log = logging.getLogger("nbguard")


class TickSource:
    """Makes ticks. Where a reading fails the one before it stands; one that fails again and again is left out. Others go on.

    `simulated` returns the counters of a simulated device, which are told instead of this machine's; None: there is none.
    """

    def __init__(self, boot: str, simulated: Callable[[], TickReading | None]) -> None:
        self._boot = boot
        self._simulated = simulated
        self._count = 0
        self._history = Sparkline()
        self._device = DeviceReader()
        self._neighbours = Neighbours()
        self._progress = FitProgress()
        self._epoch: int | None = None
        self._last: dict[str, Any] = {}
        self._failures: Counter[str] = Counter()  # in a row

    def mark(self, label: str) -> None:
        """Put a mark on the time axis, now."""
        self._history.mark(time.time(), label)

    def call(self, names: dict[int, str]) -> None:
        """Call Learners by these names, by their ids."""
        self._progress.names = names

    def tick(self, heap: int, cell: int | None, jobs: tuple[JobStatus, ...]) -> Tick:
        """Return what the counters say now. `heap` is the number of the last heap, `cell` the number of the cell that runs."""
        self._count += 1
        now = time.time()
        simulated = self._tried("the simulated device", self._simulated)
        reading = simulated or self._tried("the counters", self._device.read) or TickReading()
        self._history.add(now, reading.in_use)
        fit = self._tried("the fit", lambda: self._progress.read(reading.peak))
        self._mark_epoch(fit)
        busy = cell is not None
        tick = build_tick(self._boot, self._count, now, heap, reading, self._history, busy=busy, cell=cell, fit=fit, jobs=jobs)
        neighbours: tuple[Neighbour, ...] = self._tried("other processes", lambda: self._neighbours.of(reading)) or ()
        return replace(tick, neighbours=neighbours)

    def close(self) -> None:
        """Give the driver's session back."""
        self._device.close()

    def _mark_epoch(self, fit: FitTick | None) -> None:
        epoch = None if fit is None else fit.epoch
        if epoch is not None and epoch != self._epoch:
            self.mark(f"epoch {epoch}")
        self._epoch = epoch

    def _tried(self, what: str, read: Callable[[], Found]) -> Found | None:
        if self._failures[what] == _GIVEN_UP:
            return None
        try:
            self._last[what] = read()
            self._failures[what] = 0
        except Exception:  # noqa: BLE001 - a mistake of ours, or another thread's work at the same time, must cost no more
            _log.debug("a sidebar's reading of %s failed", what, exc_info=True)
            self._failures[what] += 1
        return None if self._failures[what] == _GIVEN_UP else self._last.get(what)
