"""The source of ticks, from counters, the fit that runs, the waiting jobs, and the line of memory with its marks."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from nbguard.frontend.sidebar.hub.device_reader import DeviceReader
from nbguard.frontend.sidebar.hub.fit_progress import FitProgress
from nbguard.frontend.sidebar.line.mark_store import AllocatorPeak
from nbguard.frontend.sidebar.line.memory_line import MemoryLine
from nbguard.frontend.sidebar.protocol.state import JobStatus, LineHistory, Tick
from nbguard.frontend.sidebar.protocol.ticks import LastLook, build_tick, device_readings, line_points
from nbguard.memory.core.counters import TickReading
from nbguard.memory.core.oom_facts import OomFact
from nbguard.memory.scan.devices.counters import Counters

Found = TypeVar("Found")

_GIVEN_UP = 5
"""Failures in a row until a reading is given up."""

_log = logging.getLogger("nbguard")


class TickSource:
    """Makes ticks. Where a reading fails the one before it stands; one that fails again and again is left out. Others go on.

    `simulated` returns the counters of a simulated device, which are told instead of this machine's, or None without one.
    """

    def __init__(self, boot: str, simulated: Callable[[], TickReading | None]) -> None:
        self._boot = boot
        self._simulated = simulated
        self._count = 0
        self._line = MemoryLine()
        self._device = DeviceReader()
        self._counters = Counters()
        self._progress = FitProgress()
        self._tracked = ""
        self._last: dict[str, Any] = {}
        self._failures: Counter[str] = Counter()  # in a row

    def begin_cell(self, number: int, cell_id: str) -> None:
        """Note that a cell begins, on the kernel's main thread."""
        self._line.begin_cell(time.time(), number, cell_id, self._peaks())

    def end_cell(self, oom: OomFact | None = None) -> None:
        """Note that it ended, and that it ran out of memory, if it is known to have."""
        self._line.end_cell(time.time(), self._peaks(), oom)

    def call(self, names: dict[int, str]) -> None:
        """Call Learners by these names, by their ids."""
        self._progress.names = names

    def tick(self, look: LastLook | None, cell: int | None, jobs: tuple[JobStatus, ...]) -> Tick:
        """Return the present counters. `look` is the last scan of the heap, if any; `cell` the number of the cell that runs."""
        self._count += 1
        now = time.time()
        simulated = self._tried("the simulated device", self._simulated)
        reading = simulated or self._tried("the counters", self._device.read) or TickReading()
        self._tracked = reading.tracked
        devices = device_readings(reading)
        points = self._line.add(now, line_points(now, reading, devices), reading)
        fit = self._tried("the fit", lambda: self._progress.read(reading.peak))
        self._line.follow(now, fit)
        return build_tick(
            self._boot,
            self._count,
            now,
            reading,
            devices=devices,
            points=points,
            look=look or LastLook(),
            busy=cell is not None,
            cell=cell,
            fit=fit,
            jobs=jobs,
            marks=self._line.newest_marks(),
        )

    def history(self, seconds: int) -> LineHistory:
        """Return the lines of the last `seconds` up to the last tick, all that is kept if 0. In the thread that ticks."""
        return self._line.history(seconds, self._count)

    def close(self) -> None:
        """Give the driver's session back."""
        self._device.close()

    def _peaks(self) -> dict[str, AllocatorPeak] | None:
        """Return the counters of each device's allocator now, or None if unknown or uncounted."""
        try:
            return self._read_peaks()
        except Exception:  # noqa: BLE001 - a mark without its peak is better than a cell that fails
            _log.debug("the counters at a cell could not be read", exc_info=True)
            return None

    def _read_peaks(self) -> dict[str, AllocatorPeak] | None:
        simulated = self._simulated()
        if simulated is not None:
            known = ((each.device, each.allocator) for each in simulated.devices)
            return {
                device: AllocatorPeak(allocated=stats.allocated, peak=stats.peak_allocated)
                for device, stats in known
                if stats is not None
            }
        if self._tracked in ("", "cpu"):  # nobody counts, and malloc would have to be asked
            return None
        reading = self._counters.read()
        counted = () if reading is None else reading.devices
        return {each.device: AllocatorPeak(allocated=each.allocated, peak=each.peak) for each in counted}

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
