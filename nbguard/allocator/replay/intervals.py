"""Stretches of address space that neither overlap nor touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Intervals:
    """A set of addresses, kept as stretches [start, end) in order."""

    def __init__(self) -> None:
        self._edges: list[int] = []  # start, end, start, end, …

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._edges[::2], self._edges[1::2], strict=True)

    def __len__(self) -> int:
        return len(self._edges) // 2

    def add(self, start: int, end: int) -> bool:
        """Put a stretch in, joined with what it touches; return whether all of it was absent."""
        first, last = bisect_right(self._edges, start), bisect_left(self._edges, end)
        is_absent = first == last and first % 2 == 0
        if is_absent:
            self._edges[first:last] = [start, end]
            self._join(first + 1)
            self._join(first - 1)
        return is_absent

    def _join(self, index: int) -> None:
        if 0 < index < len(self._edges) - 1 and self._edges[index] == self._edges[index + 1]:
            del self._edges[index : index + 2]

    def remove(self, start: int, end: int) -> bool:
        """Take a stretch out; return whether all of it was there."""
        first, last = bisect_right(self._edges, start), bisect_left(self._edges, end)
        was_there = first == last and first % 2 == 1
        if was_there:
            self._edges[first:last] = [start, end]
            self._drop_empty(first + 1)
            self._drop_empty(first - 1)
        return was_there

    def _drop_empty(self, index: int) -> None:
        if self._edges[index] == self._edges[index + 1]:
            del self._edges[index : index + 2]
