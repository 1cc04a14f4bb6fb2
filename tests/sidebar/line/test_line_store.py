"""The line over hours: no maximum is lost, a step stays a step, and its memory is bounded."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nbguard.frontend.sidebar.memory_line import GAP, LEVELS, LineStore, thinned
from nbguard.frontend.sidebar.protocol.state import LinePoint

NOW = 1_790_000_000.0
DAY = 24 * 3600


def reading(t: float, nbytes: int, high: int | None = None) -> LinePoint:
    return LinePoint(t, t, nbytes, high or nbytes, nbytes, 2 * nbytes, 7, 1000 - nbytes)


def line_of(values: list[int], rate: float = 4.0, start: float = NOW) -> LineStore:
    line = LineStore()
    for place, nbytes in enumerate(values):
        line.add(reading(start + place / rate, nbytes))
    return line


def value_at(points: tuple[LinePoint, ...], t: float) -> int:
    """Return the value of the drawn step at the time `t`: of the last point that has begun by then."""
    return next(point.allocated for point in reversed(points) if point.since <= t)


_values = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 400)), min_size=1, max_size=60).map(
    lambda runs: [nbytes for nbytes, times in runs for _ in range(times)]
)


@given(_values, st.integers(2, 300))
def test_no_extreme_is_lost_at_any_width(values: list[int], most: int) -> None:
    points = line_of(values).points(0, most)

    assert (min(point.low for point in points), max(point.high for point in points)) == (min(values), max(values))
    assert points[-1].allocated == values[-1]
    assert len(points) <= most + 1
    for earlier, later in pairwise(points):
        assert earlier.since <= earlier.until < later.since <= later.until


@given(_values, st.integers(2, 300))
def test_every_bucket_has_the_extremes_and_the_last_of_its_readings(values: list[int], most: int) -> None:
    for point in line_of(values).points(0, most):
        inside = values[round((point.since - NOW) * 4) : round((point.until - NOW) * 4) + 1]
        assert (point.low, point.high, point.allocated) == (min(inside), max(inside), inside[-1])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(40, 4000)), min_size=1, max_size=12))
def test_steps_stay_steps(runs: list[tuple[int, int]]) -> None:
    """Few changes in hours: each is where it was, to a quarter of a second, however old it is."""
    values = [nbytes for nbytes, times in runs for _ in range(times)]
    points = line_of(values).points(0, 240)

    for place, nbytes in enumerate(values):
        assert value_at(points, NOW + place / 4) == nbytes
    assert len(points) <= len(runs)


def test_a_day_of_changes_is_bounded_and_keeps_its_peak() -> None:
    """24 h at 4 Hz, every reading another, and one spike of one reading 20 hours ago."""
    line, spike = LineStore(), 4 * 4 * 3600
    for place in range(4 * DAY):
        line.add(reading(NOW + place / 4, 100 + place * 7919 % 1000, 9999 if place == spike else None))

    kept = sum(most for _, most in LEVELS)
    assert len(line) <= kept
    assert line.since is not None
    assert line.since <= NOW + 1200  # all of the day is there
    points = line.points(0, 240)
    assert len(points) <= 241
    (highest,) = [point for point in points if point.high == 9999]
    assert highest.since <= NOW + spike / 4 <= highest.until
    minute = line.points(NOW + DAY - 60, 240)
    assert len(minute) == 240
    assert all(point.since == point.until for point in minute)  # each reading is there


def test_what_is_older_than_all_levels_is_dropped() -> None:
    line = LineStore()
    for hour in range(24 * 60):
        for n in range(8):
            line.add(reading(NOW + hour * 3600 + n * 450, hour * 8 + n))

    assert len(line) <= sum(most for _, most in LEVELS)


def test_hours_of_nothing_new_are_one_point() -> None:
    points = line_of([5] * 40_000, rate=1.0).points(0, 240)

    assert points == (LinePoint(NOW, NOW + 39_999, 5, 5, 5, 10, 7, 995),)


def test_time_in_which_nobody_looked_stays_a_gap() -> None:
    line = LineStore()
    for t in (0.0, 1.0, 2.0, 2.0 + 10 * GAP, 3.0 + 10 * GAP):
        line.add(reading(NOW + t, 5))

    assert [(point.since - NOW, point.until - NOW) for point in line.points(0, 240)] == [(0, 2), (2 + 10 * GAP, 3 + 10 * GAP)]


def test_old_points_stand_still_while_time_goes_on() -> None:
    line = line_of([n * 7919 % 1000 for n in range(3000)])
    before = line.points(0, 240)
    line.add(reading(NOW + 750, 5))

    assert set(before[2:-2]) <= set(line.points(0, 240))


def test_a_span_begins_with_what_was_in_force() -> None:
    line = line_of([5] * 400 + [6] * 400)

    points = line.points(NOW + 150, 240)
    assert [point.allocated for point in points] == [6]
    assert points[0].since < NOW + 150


def test_thinning_is_the_same_in_one_go_and_in_steps() -> None:
    points = line_of([n * 7919 % 1000 for n in range(500)]).points(0, 10**6)

    assert thinned(thinned(points, 2.0), 16.0) == thinned(points, 16.0)
