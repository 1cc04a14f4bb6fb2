"""Levels of memory over a fit, as points for a picture, and the highest level of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable

from nbguard.training.profiler.analysis.memory.memory_report import Level
from nbguard.training.profiler.analysis.report import MemoryPoint, PhasePeak

MOST_POINTS = 2000
_FIRST = 24, 4
"""Batches whose boundaries and insides are always sampled, whatever the cost."""
_SLOW = 1_000_000
"""Nanoseconds of a reading that must be afforded inside of the first batches, too: malloc's counter goes through
all that is free, 13 ms with some 250,000 tensors alive."""
_SHARE = 0.001
"""Share of the time that has passed that reading the counters at boundaries may take; and once more inside batches."""
_HEAD_START = 5_000_000, 1_500_000
"""Nanoseconds that each of both may take beyond that: a short fit would be seen too seldom to say anything of it."""
_READS = 10
"""Readings in a batch whose phases are followed, about."""


class Pace:
    """Says when a reading can be afforded, going by the processor time that readings have taken so far."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._began = clock()
        self._spent = [0, 0]  # nanoseconds: at boundaries, inside batches
        self._readings = 0
        self._cost = 0.0  # nanoseconds of a reading
        self._next = [0.0, 0.0]  # from when on a reading can be afforded, by the clock

    @staticmethod
    def begin() -> int:
        """Return the time at which a reading begins, for `note`."""
        return time.thread_time_ns()

    def note(self, begun: int, *, inside: bool) -> None:
        """Note that a reading ended: `inside` a batch, or at the boundary of one."""
        self._spent[inside] += time.thread_time_ns() - begun
        self._readings += 1
        self._cost = sum(self._spent) / self._readings
        for place, (spent, readings) in enumerate(zip(self._spent, (1, _READS), strict=True)):
            self._next[place] = self._began + (spent + self._cost * readings - _HEAD_START[place]) / _SHARE

    def allows(self, batch: int, *, inside: bool) -> bool:
        """Say whether the boundary before a batch may be read, or the inside of that batch, too."""
        is_first = batch <= _FIRST[inside] and not (inside and self._cost > _SLOW)
        return is_first or self._clock() >= self._next[inside]


class LevelHistory:
    """Points, thinned out by half whenever they are too many, and peaks by phase."""

    def __init__(self, start: Level) -> None:
        self.highest = start.allocated  # bytes: seen, or of the peak counter
        self.highest_phase = ""
        self.last = start
        self._group: list[MemoryPoint] = []
        self._groups = [self._group]  # one for each batch that is kept
        self._points = 0
        self._every = 1
        self._seen = 1
        self._peaks: dict[str, int] = {}

    def begin_batch(self) -> None:
        """Let the points that follow belong together: they are kept or dropped together."""
        self._group = []
        if self._seen % self._every == 0:
            self._groups.append(self._group)
        self._seen += 1

    def add(self, at: int, phase: str, batch: int, level: Level, *, follows: bool) -> int:
        """Note the counters at the end of a phase; return the highest level that is known of it, in bytes.

        Args:
            at: nanoseconds since the recording began.
            phase: that has just ended.
            batch: number of the batch.
            level: the counters now.
            follows: the reading before was at the beginning of this phase.
        """
        self._group.append(MemoryPoint(at=at, phase=phase, batch=batch, allocated=level.allocated, reserved=level.reserved))
        self._points += self._group is self._groups[-1]
        counted = level.peak if level.peak is not None and self.last.peak is not None and level.peak > self.last.peak else 0
        read = max(level.allocated, self.last.allocated) if follows else level.allocated
        highest = max(counted, read)
        if follows:
            self._peaks[phase] = max(self._peaks.get(phase, 0), highest)
        if highest > self.highest:
            self.highest, self.highest_phase = highest, phase if follows else ""
        self.last = level
        self._thin()
        return highest

    def _thin(self) -> None:
        if self._points > MOST_POINTS and len(self._groups) > 1:
            self._groups = self._groups[::2]
            self._every *= 2
            self._points = sum(map(len, self._groups))

    @property
    def points(self) -> tuple[MemoryPoint, ...]:
        """Return the points that are kept, oldest first."""
        return tuple(point for group in self._groups for point in group)

    @property
    def phases(self) -> tuple[PhasePeak, ...]:
        """Return the highest level of each phase that was followed."""
        return tuple(PhasePeak(phase, most) for phase, most in self._peaks.items())
