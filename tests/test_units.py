from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.units import GiB, KiB, MiB, format_bytes, format_column, unit_of


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KiB, "1.00 KiB"),
        (1536 * KiB, "1.50 MiB"),
        (3 * GiB + 54 * MiB, "3.05 GiB"),
        (None, "?"),
    ],
)
def test_bytes_read_with_their_unit(nbytes: int | None, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.lists(st.integers(0, 200 * GiB), min_size=1, max_size=30))
def test_a_column_re_adds_to_its_total_as_shown(values: list[int]) -> None:
    """In hundredths of one unit, the figures sum to the rounded sum."""
    size, name = unit_of(max(values))
    figures = format_column(values)

    assert all(figure.endswith(f" {name}") for figure in figures)
    if size > 1:
        shown = sum(round(float(figure.split()[0]) * 100) for figure in figures)
        assert shown == (sum(values) * 200 + size) // (2 * size)


@given(st.lists(st.integers(0, 200 * GiB), min_size=1, max_size=30))
def test_a_figure_is_off_by_less_than_a_hundredth(values: list[int]) -> None:
    size, _ = unit_of(max(values))

    for value, figure in zip(values, format_column(values), strict=True):
        assert abs(float(figure.split()[0]) - value / size) <= 0.01 + 1e-9
