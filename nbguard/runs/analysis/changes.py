"""Two sequences of texts side by side: the ranges that differ, in time that grows as their length does."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence


def changes(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[range, range]]:
    """Yield the places in both that differ, from the first on; one of the two ranges may be empty.

    Texts that each sequence has once, in the same order, belong together; so do equal ones around them.
    """
    start, other = 0, 0
    for here, there in (*_anchors(first, second), (len(first), len(second))):
        left, right = _differing(first, second, range(start, here), range(other, there))
        if left or right:
            yield left, right
        start, other = here + 1, there + 1


def _differing(first: Sequence[str], second: Sequence[str], left: range, right: range) -> tuple[range, range]:
    """Return two ranges without what is equal at their beginnings and ends."""
    most, begin = min(len(left), len(right)), 0
    while begin < most and first[left[begin]] == second[right[begin]]:
        begin += 1
    end = 0
    while end < most - begin and first[left[-1 - end]] == second[right[-1 - end]]:
        end += 1
    return left[begin : len(left) - end], right[begin : len(right) - end]


def _anchors(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of most texts that occur once in each, so that they rise in both: a longest rising sequence."""
    places = [{text: place for place, text in enumerate(texts) if count[text] == 1} for texts, count in _counted(first, second)]
    pairs = [(place, places[1][text]) for text, place in places[0].items() if text in places[1]]
    lasts: list[int] = []  # of the rising sequences of each length the smallest last place in the second
    ends: list[int] = []  # the pairs with these places
    before: list[int] = []  # of each pair the one before it in the sequence that it ends
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(lasts, place)
        before.append(ends[length - 1] if length else -1)
        lasts[length : length + 1] = [place]
        ends[length : length + 1] = [number]
    rising, number = [], ends[-1] if ends else -1
    while number >= 0:
        rising.append(pairs[number])
        number = before[number]
    return rising[::-1]


def _counted(*sequences: Sequence[str]) -> Iterator[tuple[Sequence[str], Counter[str]]]:
    for texts in sequences:
        yield texts, Counter(texts)
