"""What is too small to be shown: one rule for rows, findings, badges, buttons and the sentence on what is left alone."""

from __future__ import annotations

from collections.abc import Iterable

from nbguard.units import MiB

_PART = 100
"""Holders of less than this part of what is held are small,"""
_TOGETHER = 10
"""unless they have more than this part of it together: then one line for all would hide where the memory is."""


def least_shown(held: int) -> int:
    """Return the bytes from which something has a row, a finding or a button of its own, where `held` bytes are held in all.

    1 MiB, or a hundredth of what is held if that is more.
    """
    return max(MiB, held // _PART)


def least_of_rows(sizes: Iterable[int]) -> int:
    """Return the bytes from which one of these rows is shown by itself."""
    rows = list(sizes)
    held = sum(rows)
    least = least_shown(held)
    return MiB if sum(size for size in rows if size < least) > held // _TOGETHER else least
