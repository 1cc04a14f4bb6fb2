"""The log of a fit as it grows, and the schedule of its sampled batches: the first ones all, later fewer, and some in a row."""

from __future__ import annotations

import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, LogPosition, PhaseLog

# --- The log of a fit as it grows, with two numbers for each mark and boundary


_RESERVED = 16384
"""Numbers that the list has room for, after as many zeros, before it has to be copied to a larger place."""
_LOOSE = 8192
"""Numbers that may be in the list before they are packed, which is done only at sampled batches."""
_PAIR = struct.calcsize("=hq")
_KINDS: tuple[BoundaryKind, ...] = get_args(BoundaryKind)
BOUNDARY_CODES = {kind: ~number for number, kind in enumerate(_KINDS)}
"""The numbers of boundaries in the log: below 0, as those of phases are not."""


class Log:
    """Marks and boundaries in their order. `mark(code)` logs the phase that has gone on since the mark before.

    Code that every batch passes adds its entries by itself, several at once, without a call: `add((code, clock()))` is a mark,
    `add((BOUNDARY_CODES[kind], loop))` a boundary. All numbers of one `add` come or none, wherever an interrupt falls.
    An array takes several times as long to take a number as a list, which is packed from time to time. CPython keeps the memory
    of a list that it shortens to no less than half; so its first half is never used, and nothing is copied as it grows.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._loose = [0] * (2 * _RESERVED)  # of a mark its code and time; of a boundary its kind, below 0, and loop
        del self._loose[_RESERVED:]
        self._packed: list[bytes] = []  # entries before those, packed
        self._before = 0  # entries that are packed
        self.add = self._loose.extend
        self.mark: Callable[[int], None] = _marker(self.add, clock)

    def boundary(self, kind: BoundaryKind, loop: int) -> None:
        """Log a boundary."""
        self.add((BOUNDARY_CODES[kind], loop))

    def pack(self) -> None:
        """Pack the entries, if there are many."""
        if len(self._loose) > _RESERVED + _LOOSE:
            numbers = self._loose[_RESERVED:]
            packed, count = _pack(numbers), len(numbers) // 2
            del self._loose[_RESERVED:]  # first: an interrupt here costs some of the log, and leaves the rest in order
            self._packed.append(packed)
            self._before += count

    def __len__(self) -> int:
        """Return the number of entries: marks and boundaries."""
        return self._before + (len(self._loose) - _RESERVED) // 2

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that the packed entries have."""
        return sum(map(sys.getsizeof, self._packed))

    def position(self, entries: int) -> LogPosition:
        """Return the place after so many of the first entries."""
        boundaries = sum(1 for _ in self.boundaries(entries))
        return LogPosition(entries - boundaries, boundaries)

    def _columns(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield entries by column: the codes of phases and boundaries, and the times or loops."""
        yield from map(_unpacked, self._packed)
        yield self._loose[_RESERVED::2], self._loose[_RESERVED + 1 :: 2]

    def boundaries(self, most: int | None = None, first: int = 0) -> Iterator[Boundary]:
        """Yield the boundaries, or those among so many of the first entries, from entry `first` on."""
        before = number = 0
        for codes, loops in self._columns():
            for place in [place for place, code in enumerate(codes) if code < 0]:
                entry = before + place
                if entry >= first and (most is None or entry < most):
                    yield Boundary(entry - first - number, _KINDS[~codes[place]], loops[place])
                    number += 1
            before += len(codes)

    def end(self, start: int, labels: tuple[str, ...], callbacks: Mapping[str, str]) -> PhaseLog:
        """Return the whole log since `start`, and empty it. `labels` are the phases by their codes.

        Cycles hold it until the next collection of all objects. Its room for numbers would wait there, too.
        """
        codes, times = array("H"), array("q")
        for column, ends in self._columns():
            codes.extend([code for code in column if code >= 0])
            times.extend([end for code, end in zip(column, ends, strict=True) if code >= 0])
        boundaries = tuple(self.boundaries())
        self._before = len(self) + _RESERVED // 2  # so that the length stays
        self._loose.clear()
        self._packed.clear()
        return PhaseLog(start=start, codes=codes, times=times, labels=labels, boundaries=boundaries, callbacks=callbacks)


def _pack(numbers: Sequence[int]) -> bytes:
    """Return pairs of numbers as bytes, ten for each pair."""
    count = len(numbers) // 2
    return struct.pack(f"={count}h{count}q", *numbers[::2], *numbers[1::2])


def _unpacked(packed: bytes) -> tuple[Sequence[int], Sequence[int]]:
    """Return the two columns of pairs."""
    count = len(packed) // _PAIR
    numbers = struct.unpack(f"={count}h{count}q", packed)
    return numbers[:count], numbers[count:]


def _marker(add: Callable[[tuple[int, int]], None], clock: Callable[[], int]) -> Callable[[int], None]:
    """Return `Log.mark`: a function that looks nothing up."""

    def mark(code: int) -> None:
        add((code, clock()))

    return mark


# --- The turn of a fetch that is profiled, while nbguard's other threads run no Python
#
# From Python 3.12 on a profiler takes the calls of all threads for calls of one.


_PATIENCE = 0.05  # seconds; a sample of a stack takes some 50 µs


class Turn:
    """A lock, held by the fetch that is profiled and by another thread that looks. It knows when the last such fetch ended."""

    __slots__ = ("_clock", "ended", "lock")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.lock = threading.Lock()
        self.ended: int = 0  # by the clock

    def begin(self) -> bool:
        """Take the turn; say whether it could be had."""
        return self.lock.acquire(timeout=_PATIENCE)

    def end(self) -> None:
        """Give it back."""
        self.ended = self._clock()
        self.lock.release()


# --- sampling


_ALL = 32
_OFTEN = 13
_SOON = 128
_SELDOM = 37
_LATE = 512
_RARELY = 101
"""The first batches are all sampled, then each 13th, of a long fit each 37th, and late in it each 101st: no usual interval
of a loop is a multiple of these."""
_AGAIN = 4
"""Batches in a row that are sampled where a long fit has become twice as long, from batch `2 * _SOON` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Whether a batch is sampled."""

    is_in_stretch: bool  # all batches around it are, too
    is_looked_at: bool
    next: int  # number of the batch that is the next to be chosen: those between are not sampled


class SampleSchedule:
    """Chooses the sampled batches. It is called for each in turn, except those skipped by the previous choice."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, batches: int) -> None:
        """Begin with a fit after so many begun batches."""
        self._all = batches + _ALL  # up to here every batch is sampled
        self._again = 2 * _SOON  # batch at the beginning of a stretch in a long fit

    def look_up_to(self, number: int) -> None:
        """Have all batches up to this one looked at."""
        self._all = max(self._all, number)

    def choose(self, number: int) -> Choice:
        """Return whether a batch that begins is sampled."""
        if number >= self._again:
            self._again *= 2
            self.look_up_to(number + _AGAIN - 1)
        is_in_stretch = number <= self._all
        every = _OFTEN if number <= _SOON else _SELDOM if number <= _LATE else _RARELY
        is_looked_at = is_in_stretch or number % every == 0
        return Choice(
            is_in_stretch=is_in_stretch,
            is_looked_at=is_looked_at,
            next=number + 1 if is_looked_at else number - number % every + every,
        )
