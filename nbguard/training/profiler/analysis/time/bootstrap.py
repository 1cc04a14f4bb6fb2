"""The interval of a ratio of two medians, by resampling batches in whole stretches, since neighbours are alike."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import mul
from random import Random

ENOUGH = 20
"""With fewer values than this in a run nothing is said."""

_RESAMPLES = 400


def ratio_interval(now: Sequence[int], before: Sequence[int]) -> tuple[float, float] | None:
    """Return the 95 % interval of median(now) / median(before); None where the values are too few, or drift too much.

    Drawn with a generator of its own, always the same.
    """
    if not (says_something(now) and says_something(before)):
        return None
    random = Random(0)  # noqa: S311 - draws samples, guards no secret
    above, below = list(_medians(now, random)), list(_medians(before, random))
    if not min(below):
        return None
    ratios = sorted(one / other for one, other in zip(above, below, strict=True))
    edge = _RESAMPLES // 40
    return ratios[edge], ratios[-edge - 1]


def says_something(values: Sequence[int]) -> bool:
    """Say whether there are values enough, and enough stretches of them that are not alike."""
    return len(values) >= ENOUGH and len(values) >= 6 * stretch(values)


def median(values: Sequence[int]) -> int:
    """Return the median; of an even number of values the upper of the middle two."""
    return sorted(values)[len(values) // 2]


def _medians(values: Sequence[int], random: Random) -> Iterator[int]:
    """Yield the medians of series as long as this one, put together from stretches of it."""
    length, size = stretch(values), len(values)
    around = [*values, *values[:length]]  # the end goes on at the start: each value is as likely as any other
    for _ in range(_RESAMPLES):
        drawn: list[int] = []
        while len(drawn) < size:
            start = random.randrange(size)
            drawn += around[start : start + length]
        yield median(drawn[:size])


def stretch(values: Sequence[int]) -> int:
    """Return how many values in a row are drawn together: thrice as far as they are alike, and never less than n^⅓."""
    size = len(values)
    ranks = _centred_ranks(values)
    noise = 2 / size**0.5 * sum(rank * rank for rank in ranks)
    alike = 0
    while alike < size // 4 and sum(map(mul, ranks, ranks[alike + 1 :])) > noise:
        alike += 1
    return max(3 * alike, round(math.pow(size, 1 / 3)))


def _centred_ranks(values: Sequence[int]) -> list[float]:
    """Return the place of each value in order of size, less the mean place: one very slow batch then weighs no more."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - len(values)) / 2 for value in values]
