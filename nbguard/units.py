"""Units and numbers as people read them: bytes, times, counts, and columns that add up to their total."""

from __future__ import annotations

import re
from collections.abc import Sequence

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

HALF_ROUNDS_TO_ZERO = 2.0**-25
"""The largest number that float16 rounds to 0: half of the smallest that it has, and ties go to even."""

_UNITS = ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
_THOUSAND_AS_SHOWN = 1999
"""Halves of a unit that round to 1000 of it: from there on the next unit reads better, `1 MiB` and not `1023 KiB`."""
_SECOND = 10**9
_TIME_UNITS = ((_SECOND, "s"), (10**6, "ms"), (10**3, "µs"))
_CLOCK = 100 * _SECOND
"""From here on durations read as on a clock: in hours, minutes and seconds."""
_COLUMN_DIGITS = 4
"""Of the total of a column of durations."""


def unit_of(nbytes: int) -> tuple[int, str]:
    """Return (bytes per unit, name of the unit) that `nbytes` reads well in, with three digits at most before the point.

    Bytes themselves are exact, so that 1023 of them are still `1023 B`.
    """
    for size, name in _UNITS:
        if nbytes >= size or (size > KiB and 2 * nbytes >= _THOUSAND_AS_SHOWN * (size // KiB)):
            return size, name
    return 1, "B"


def format_bytes(nbytes: int | None) -> str:
    """Return `nbytes` to three digits with its unit, e.g. '3.05 GiB', '64 MiB', '512 B'; an unknown amount (None) is '?'.

    Halves of the last digit go up, as in a column and in the browser: cuBLAS's workspace of 8.125 MiB is 8.13 MiB everywhere.
    """
    if nbytes is None:
        return "?"
    size, name = unit_of(abs(nbytes))
    return f"{nbytes} B" if size == 1 else f"{_number(_hundredths(nbytes, size), nbytes)} {name}"


def _step(nbytes: int, size: int) -> int:
    """Return the last digit that is shown of `nbytes`, the third one or the second decimal, in hundredths of the unit."""
    whole = abs(nbytes) // size
    return 100 if whole >= 100 else 10 if whole >= 10 else 1


def _hundredths(nbytes: int, size: int) -> int:
    """Return `nbytes` in hundredths of a unit, rounded to the digits that are shown."""
    part = size * _step(nbytes, size)
    rounded = (200 * abs(nbytes) + part) // (2 * part) * (part // size)
    return -rounded if nbytes < 0 else rounded


def _number(hundredths: int, nbytes: int) -> str:
    """Return a number in hundredths of a unit without needless zeros; of bytes too few for the unit, that they are fewer."""
    sign = "-" if nbytes < 0 else ""
    if nbytes and not hundredths:
        return f"{sign}<0.01"
    return f"{sign}{abs(hundredths) // 100}.{abs(hundredths) % 100:02}".rstrip("0").rstrip(".")


def signed(nbytes: int) -> str:
    """Return a change of bytes with its sign: '+364 MiB', '−4.33 MiB', '±0 B'."""
    return f"{'+' if nbytes > 0 else '−' if nbytes else '±'}{format_bytes(abs(nbytes))}"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words: '1 tensor', '2 tensors', '3 batches' with `many`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def parse_bytes(text: str) -> int:
    """Return the bytes that a size such as `16GiB`, `512 MiB` or `80g` means; units are powers of 1024.

    Raises:
        ValueError: it is no size, or a small number without a unit: who writes `16` seldom means bytes.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 16GiB or 512MiB")
    if text.strip().isdecimal() and 0 < int(text) < KiB**2:
        raise ValueError(f"{text.strip()} has no unit; write it as {text.strip()}GiB or {text.strip()}MiB")
    return int(float(match[1]) * KiB ** ("", "k", "m", "g", "t").index(match[2].lower()))


def format_column(values: Sequence[int], unit: tuple[int, str] | None = None) -> list[str]:
    """Return `values` (bytes) as numbers with one unit, each to three digits, that add up to their total as it is shown.

    Added up and rounded to the last digit of the total (or of the largest value, where negative ones make the total small), the
    figures give the total: where rounding each by itself would not, those that lose least are rounded the other way. `0` is
    nothing at all: a size above 0 but too little for the unit is `<0.01`.
    """
    size, name = unit or unit_of(max(values, default=0))
    if size == 1:
        return [f"{value} {name}" for value in values]
    figures = zip(_re_adding_hundredths(values, size), values, strict=True)
    return [f"{_number(hundredths, value)} {name}" for hundredths, value in figures]


def _re_adding_hundredths(values: Sequence[int], size: int) -> list[int]:
    """Return `values` in hundredths of a unit, each rounded to its digits, so that they add up to their rounded sum."""
    total = sum(values)
    shown = [_hundredths(value, size) for value in values]
    last_digit = max(_step(value, size) for value in (*values, total))
    surplus = sum(shown) - _hundredths(total, size)
    direction = 1 if 2 * surplus >= last_digit else -1 if 2 * surplus < -last_digit else 0
    rounded_by = [direction * (hundredths * size - 100 * value) for hundredths, value in zip(shown, values, strict=True)]
    for place in sorted(range(len(values)), key=lambda place: (-rounded_by[place], place)):
        if rounded_by[place] <= 0 or -last_digit <= 2 * surplus < last_digit:
            break
        change = direction * _step(values[place], size)
        shown[place] -= change
        surplus -= change
    return shown


def re_adding(values: Sequence[int], parts: int, whole: int) -> list[int]:
    """Return `values` times `parts` / `whole`, rounded so that they add up to their rounded sum.

    Each is rounded down; the missing units go to the largest remainders, one each.
    """
    scaled = [divmod(value * parts, whole) for value in values]
    missing = (sum(values) * parts * 2 + whole) // (2 * whole) - sum(floor for floor, _ in scaled)
    by_remainder = sorted(range(len(values)), key=lambda i: (-scaled[i][1], i))
    rounded_up = set(by_remainder[:missing])
    return [floor + (i in rounded_up) for i, (floor, _) in enumerate(scaled)]


def format_time(ns: float, of: int | None = None) -> str:
    """Return nanoseconds to three digits: '12.8 ms', '1.25 s', '3 min 12 s'; with `of` as in a column whose total that is."""
    if ns < 0:
        return f"-{format_time(-ns, of)}"
    ns = round(ns)
    digits = 3 if of is None else _COLUMN_DIGITS
    step = _time_step(ns if of is None else of, digits)
    rounded = (2 * ns + step) // (2 * step) * step
    return _time(rounded, rounded if of is None else of, digits)


def parse_time(text: str) -> int:
    """Return the nanoseconds that a time such as `20ms`, `1.5 s` or `300us` means.

    Raises:
        ValueError: it is no time, or has no unit.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ns|us|µs|ms|s)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write it as 20ms")
    return round(float(match[1]) * {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}[match[2]])


def re_adding_times(values: Sequence[int]) -> list[int]:
    """Return `values` (nanoseconds) rounded as `format_time` shows them with `of` their sum, so that they add up to it."""
    step = _time_step(sum(values), _COLUMN_DIGITS)
    return [count * step for count in re_adding(values, 1, step)]


def _time_step(ns: int, digits: int) -> int:
    """Return the nanoseconds that a time of so many digits is rounded to multiples of: a second at most."""
    return int(10 ** min(9, max(0, len(str(ns)) - digits)))


def _time(ns: int, of: int, digits: int) -> str:
    """Return nanoseconds in the unit of `of`, with so many digits as this has."""
    step = _time_step(of, digits)
    if of >= _CLOCK:
        minutes, rest = divmod(ns, 60 * _SECOND)
        hours, minutes = divmod(minutes, 60)
        tenths = "" if step == _SECOND else f".{rest % _SECOND // (_SECOND // 10)}"
        seconds = f"{rest // _SECOND:02}{tenths} s" if hours or minutes else f"{rest // _SECOND}{tenths} s"
        return f"{hours} h {minutes:02} min {seconds}" if hours else f"{minutes} min {seconds}" if minutes else seconds
    size, name = next((unit for unit in _TIME_UNITS if of >= unit[0]), (1, "ns"))
    decimals = len(str(size)) - len(str(step))
    return f"{ns / size:.{max(0, decimals)}f} {name}"
