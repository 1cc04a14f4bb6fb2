from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.units import GiB, KiB, MiB, format_bytes, format_column, format_time, re_adding, re_adding_times, unit_of


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (1536 * KiB, "1.5 MiB"),
        (64 * MiB, "64 MiB"),
        (15 * MiB + 585 * KiB, "15.6 MiB"),
        (10 * MiB - 1, "10 MiB"),
        (100 * MiB - 1, "100 MiB"),
        (999 * KiB, "999 KiB"),
        (1000 * KiB, "0.98 MiB"),
        (1023 * KiB, "1 MiB"),
        (MiB - 1, "1 MiB"),
        (999 * MiB + 511 * KiB, "999 MiB"),
        (999 * MiB + 512 * KiB, "0.98 GiB"),
        (2048 * GiB, "2 TiB"),
        (3 * GiB + 54 * MiB, "3.05 GiB"),
        (8 * MiB + 128 * KiB, "8.13 MiB"),
        (-8 * MiB - 128 * KiB, "-8.13 MiB"),
        (None, "?"),
    ],
)
def test_bytes_read_with_their_unit(nbytes: int | None, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.lists(st.integers(0, 200 * GiB), min_size=1, max_size=30))
def test_a_column_re_adds_to_its_total_as_shown(values: list[int]) -> None:
    """The figures of one unit, added up and rounded to the digits of the total, give the total."""
    size, name = unit_of(max(values))
    figures = format_column(values)

    assert all(figure.endswith(f" {name}") for figure in figures)
    if size > 1:
        total = format_column([sum(values)], (size, name))[0]
        added = sum(_hundredths(figure) for figure in figures)
        assert format_column([-(-added * size // 100)], (size, name)) == [total.replace("<0.01", "0")]


@given(st.lists(st.integers(-200 * GiB, 200 * GiB), min_size=1, max_size=30))
def test_a_column_of_changes_re_adds_to_the_last_digit_of_the_largest(values: list[int]) -> None:
    unit = unit_of(max(map(abs, values)))
    size = unit[0]
    if size > 1:
        added = sum(_hundredths(figure) for figure in format_column(values, unit))
        total = _hundredths(format_column([sum(values)], unit)[0])
        assert abs(added - total) <= max(_last_digit(value, size) for value in (*values, sum(values))) / 2


@given(st.integers(0, 1600 * KiB).map(lambda eighths: eighths * MiB // 8))
def test_one_figure_reads_alike_alone_and_in_a_column(nbytes: int) -> None:
    assert format_column([nbytes]) == [format_bytes(nbytes)]


@given(st.lists(st.integers(0, 200 * GiB), min_size=1, max_size=30))
def test_a_figure_has_three_digits_and_is_off_by_less_than_the_last(values: list[int]) -> None:
    size, _ = unit_of(max(values))

    for value, figure in zip(values, format_column(values), strict=True):
        assert size == 1 or len(figure.split()[0].replace(".", "").lstrip("<0")) <= 3
        assert abs(_hundredths(figure) - 100 * value / size) <= _last_digit(value, size) + 1e-9


def _hundredths(figure: str) -> int:
    """Return a figure in hundredths of its unit; what is less than one counts as none."""
    number = figure.split()[0]
    return 0 if number.endswith("<0.01") else round(float(number) * 100)


def _last_digit(nbytes: int, size: int) -> int:
    """Return the last of three digits of a figure, in hundredths of its unit."""
    return 1 if abs(nbytes) < 10 * size else 10 if abs(nbytes) < 100 * size else 100


@pytest.mark.parametrize(
    ("values", "figures"),
    [
        ([8 * GiB, 4 * KiB, 0], ["8 GiB", "<0.01 GiB", "0 GiB"]),
        ([8 * GiB, -4 * KiB], ["8 GiB", "-<0.01 GiB"]),
        ([MiB, 512], ["1 MiB", "<0.01 MiB"]),
        ([5, 0], ["5 B", "0 B"]),
        ([GiB, GiB // 3, GiB // 3, GiB // 3], ["1 GiB", "0.34 GiB", "0.33 GiB", "0.33 GiB"]),
        ([100 * MiB + 400 * KiB, 100 * MiB + 400 * KiB, 6 * MiB], ["101 MiB", "100 MiB", "6 MiB"]),
        ([512 * MiB, 15 * MiB + 585 * KiB, 410 * KiB], ["512 MiB", "15.6 MiB", "0.4 MiB"]),
    ],
)
def test_a_column_has_one_unit_and_what_is_there_never_reads_as_nothing(values: list[int], figures: list[str]) -> None:
    assert format_column(values) == figures


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (512, "512 ns"),
        (999.9, "1.00 µs"),
        (-8.1e6, "-8.10 ms"),
        (1_000, "1.00 µs"),
        (12_800, "12.8 µs"),
        (12_800_000, "12.8 ms"),
        (999_400_000, "999 ms"),
        (999_960_000, "1.00 s"),
        (1_250_000_000, "1.25 s"),
        (99_940_000_000, "99.9 s"),
        (99_960_000_000, "1 min 40 s"),
        (192_000_000_000, "3 min 12 s"),
        (7_387_000_000_000, "2 h 03 min 07 s"),
    ],
)
def test_a_time_reads_with_its_unit(ns: float, text: str) -> None:
    assert format_time(ns) == text


def format_times(values: list[int]) -> list[str]:
    """Return a column of durations as reports show it."""
    return [format_time(each, sum(values)) for each in re_adding_times(values)]


def test_a_column_of_times_has_one_unit_and_four_digits() -> None:
    assert format_times([38_412_345_678, 912_345_001, 0]) == ["38.41 s", "0.91 s", "0.00 s"]
    assert format_times([41_200_000_000, 72_340_000_000]) == ["41.2 s", "1 min 12.3 s"]
    assert format_times([9_999_600, 400]) == ["10.00 ms", "0.00 ms"]
    assert format_time(912_345_001, of=39 * 10**9) == "0.91 s"
    assert format_times([]) == []


_SECONDS = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def seconds(figure: str) -> float:
    """Return a duration as written, in seconds."""
    words = figure.split()
    return sum(float(number) * _SECONDS[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=30))
def test_times_as_shown_re_add_to_their_total_as_shown(values: list[int]) -> None:
    total = sum(values)
    assert sum(map(seconds, format_times(values))) == pytest.approx(seconds(format_time(total, total)), rel=1e-9, abs=1e-12)


@given(st.integers(0, 10**14))
def test_a_time_as_shown_is_off_by_less_than_its_last_digit(ns: int) -> None:
    assert seconds(format_time(ns)) == pytest.approx(ns / 10**9, rel=0.0051, abs=1e-12)


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=30), st.integers(1, 2000))
def test_shares_add_up_to_the_whole(values: list[int], parts: int) -> None:
    whole = sum(values) or 1
    shares = re_adding(values, parts, whole)

    assert sum(shares) == (parts if sum(values) else 0)
    assert all(abs(share - value * parts / whole) <= 1 for share, value in zip(shares, values, strict=True))
