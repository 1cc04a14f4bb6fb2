"""The last minutes of a kernel's memory, in few points: what a sidebar draws as a line, with marks on its time axis."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from nbguard.sidebar.protocol.state import TimeMark
from nbguard.sidebar.protocol.truncation import truncate_utf8

WINDOW = 300.0
"""Seconds that are kept."""
POINTS = 60
"""So many points are drawn of all devices together, half of them of the last seconds, one each."""
MARKS = 12

Point = tuple[float, int]


class Sparkline:
    """Bytes in use by device over time, the most of each second; and marks: the starts of cells and epochs."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {}
        self._old: dict[str, tuple[object, tuple[Point, ...]]] = {}
        self._marks: deque[TimeMark] = deque(maxlen=MARKS)

    def add(self, t: float, nbytes: Mapping[str, int]) -> None:
        """Note what each device has in use at the time `t`, to a tenth of a second; what has become too old is forgotten."""
        t = round(t, 1)
        for device, found in nbytes.items():
            points = self._points.setdefault(device, deque())
            if len(points) > 1 and int(points[-1][0]) == int(points[-2][0]):  # the last point of a second is always kept apart
                last, before = points.pop(), points.pop()
                points.append(max(last, before, key=lambda point: point[1]))
            points.append((t, found))
        for device in list(self._points):
            points = self._points[device]
            while points and points[0][0] < t - WINDOW:
                points.popleft()
            if not points:
                del self._points[device]

    def mark(self, t: float, label: str) -> None:
        """Note that something starts."""
        self._marks.append(TimeMark(round(t, 1), truncate_utf8(label, 60)))

    def marks(self, now: float) -> tuple[TimeMark, ...]:
        """Return the marks of the window, oldest first."""
        return tuple(mark for mark in self._marks if mark.t >= now - WINDOW)

    def points(self, device: str) -> tuple[Point, ...]:
        """Return the line of a device, oldest first: its share of the points.

        Half are the newest, of the others the highest of each stretch of time. Stretches lie on a fixed grid, so that a point
        does not change as it grows older.
        """
        found = list(self._points.get(device, ()))
        share = max(2, POINTS // max(1, len(self._points)))
        if len(found) <= share:
            return tuple(found)
        new = share // 2
        return (*self._thinned(device, found[:-new], share - new), *found[-new:])

    def _thinned(self, device: str, old: list[Point], most: int) -> tuple[Point, ...]:
        """Return at most so many of a device's old points. They change once a second, and are thinned as often."""
        end = (old[-1], most)
        if device not in self._old or self._old[device][0] != end:
            self._old[device] = (end, tuple(_highest(old, most)))
        return self._old[device][1]


def _highest(points: list[Point], most: int) -> Iterator[Point]:
    width = WINDOW / max(1, most - 1)  # a window that begins within a stretch meets one more
    found: dict[int, Point] = {}
    for point in points:
        place = int(point[0] / width)
        found[place] = max(found.get(place, point), point, key=lambda each: each[1])
    yield from found.values()
