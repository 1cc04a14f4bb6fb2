"""What is small: below 1 MiB or a hundredth of all, but never most of what is held."""

from __future__ import annotations

import pytest

from nbguard.memory.core.advice import least_of_rows
from nbguard.units import MiB


@pytest.mark.parametrize(
    ("sizes", "least"),
    [
        ([8, 16], MiB),
        ([4 * MiB, 8], MiB),
        ([1000 * MiB, 5 * MiB, 5 * MiB], 1010 * MiB // 100),
        ([5 * MiB] * 200, MiB),  # each is half a hundredth, and there is nothing else
        ([1000 * MiB, *[9 * MiB] * 14], MiB),
        ([], MiB),
    ],
)
def test_small_rows_are_never_most_of_what_is_held(sizes: list[int], least: int) -> None:
    assert least_of_rows(sizes) == least
