"""The line of one device over hours, in bounded memory, exact while readings are few, in ever wider buckets as they grow old.

Equal readings in a row are one point however long they last, so that a step stays a step. Where readings change faster than a
level keeps them, the oldest are merged into buckets of time on a fixed grid. A bucket keeps the least, the most and the last of
its readings: no maximum is ever lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from nbguard.frontend.sidebar.protocol.state import LinePoint

GAP = 12.0
"""Least seconds without a reading that make a gap: no view was open, or the kernel could not tell."""

LEVELS: tuple[tuple[float, int], ...] = ((0.0, 600), (2.0, 450), (15.0, 480), (120.0, 720), (1200.0, 504))
"""(seconds of a bucket, points kept) from the newest level on. If every reading differs, that is 2 min at 4 Hz, then 15 min,
2 h, a day, a week; older readings are dropped."""


class LineStore:
    """The points of one device's line, newest first among the levels, oldest first within each."""

    def __init__(self) -> None:
        self._levels: tuple[deque[LinePoint], ...] = tuple(deque() for _ in LEVELS)

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def add(self, point: LinePoint) -> None:
        """Note a reading, later than all before."""
        newest = self._levels[0]
        if newest and _is_same(newest[-1], point):
            newest[-1] = merged(newest[-1], point)
        else:
            newest.append(point)
        for place, (_, kept) in enumerate(LEVELS):
            level = self._levels[place]
            if len(level) <= kept:
                return
            oldest = level.popleft()
            if place + 1 < len(LEVELS):
                _append(self._levels[place + 1], oldest, LEVELS[place + 1][0])

    def points(self, since: float, most: int) -> tuple[LinePoint, ...]:
        """Return the line from the time `since` on, oldest first, in at most about `most` points.

        Buckets lie on a fixed grid: a point does not change as it grows older, only as the grid gets wider.
        """
        kept = [point for point in chain.from_iterable(reversed(self._levels)) if point.until >= since]
        if len(kept) <= most:
            return tuple(kept)
        span = kept[-1].until - max(since, kept[0].since)
        return thinned(kept, _width(2.2 * span / max(1, most)))

    @property
    def since(self) -> float | None:
        """Return the time of the oldest reading; None without any."""
        return next((level[0].since for level in reversed(self._levels) if level), None)


def thinned(points: Iterable[LinePoint], width: float) -> tuple[LinePoint, ...]:
    """Return points with those that lie in one bucket of `width` seconds merged; one that reaches further stays alone."""
    line: deque[LinePoint] = deque()
    for point in points:
        _append(line, point, width)
    return tuple(line)


def merged(first: LinePoint, second: LinePoint) -> LinePoint:
    """Return two points as one, the second later than the first."""
    low, high = min(first.low, second.low), max(first.high, second.high)
    return second._replace(since=first.since, low=low, high=high)


def _append(line: deque[LinePoint], point: LinePoint, width: float) -> None:
    if line and line[-1].since // width == point.until // width:
        line[-1] = merged(line[-1], point)
    else:
        line.append(point)


def _is_same(last: LinePoint, point: LinePoint) -> bool:
    """Say whether a reading goes on with the last point: all figures are equal, and no time without readings lies between."""
    is_flat = last.low == last.high == point.low == point.high
    return is_flat and last[4:] == point[4:] and point.since - last.until <= GAP


def _width(seconds: float) -> float:
    """Return the width of a grid's buckets: the next power of two, so that the grid stays as the line grows."""
    width = 0.25
    while width < seconds:
        width *= 2
    return width
