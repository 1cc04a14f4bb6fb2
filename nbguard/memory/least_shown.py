"""What is too small to be shown: one rule for rows, findings, badges, buttons and the sentence on what is left alone."""

from __future__ import annotations

from nbguard.units import MiB

_PART = 100
"""Holders of less than this part of what is held are small."""


def least_shown(held: int) -> int:
    """Return the bytes from which something has a row, a finding or a button of its own, where `held` bytes are held in all.

    1 MiB, or a hundredth of what is held if that is more.
    """
    return max(MiB, held // _PART)
