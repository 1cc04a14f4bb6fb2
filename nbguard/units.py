"""Bytes as people read them: KiB, MiB and GiB, with columns that re-add to their total."""

from __future__ import annotations

from collections.abc import Sequence

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_UNITS = ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))


def unit_of(nbytes: int) -> tuple[int, str]:
    """Return (bytes per unit, name of the unit) in which `nbytes` reads well: the largest of which there is one or more."""
    for size, name in _UNITS:
        if nbytes >= size:
            return size, name
    return 1, "B"


def format_bytes(nbytes: int | None) -> str:
    """Return `nbytes` with its unit, e.g. '3.05 GiB', '512 B'; an unknown amount (None) is '?'."""
    if nbytes is None:
        return "?"
    size, name = unit_of(abs(nbytes))
    return f"{nbytes} B" if size == 1 else f"{nbytes / size:.2f} {name}"


def format_column(values: Sequence[int], unit: tuple[int, str] | None = None) -> list[str]:
    """Return `values` (bytes) as numbers with one unit, rounded so that they re-add to their rounded total.

    Each value is rounded down to hundredths; the hundredths that are missing go to the largest remainders.
    Rounding each value by itself would leave a reader who re-adds the column a few hundredths short.
    """
    size, name = unit or unit_of(max(values, default=0))
    if size == 1:
        return [f"{value} {name}" for value in values]
    hundredths = [divmod(value * 100, size) for value in values]
    missing = (sum(values) * 200 + size) // (2 * size) - sum(whole for whole, _ in hundredths)
    by_remainder = sorted(range(len(values)), key=lambda i: (-hundredths[i][1], i))
    rounded_up = set(by_remainder[:missing])
    return [f"{(whole + (i in rounded_up)) / 100:.2f} {name}" for i, (whole, _) in enumerate(hundredths)]
