"""The schedule of sampled batches: the first ones all, later fewer and fewer, and some in a row again in a long fit."""

from __future__ import annotations

from dataclasses import dataclass

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
