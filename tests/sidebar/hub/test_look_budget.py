"""Looks between the cells of a Run All take at most their share of the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbguard.frontend.sidebar.hub.sampler import _UNFELT, OF_ITS_CELL, SHARE, ScanBudget


@given(
    st.floats(0.001, 3.0),
    st.lists(st.floats(0.0, 5.0), min_size=5, max_size=200),
    st.lists(st.floats(_UNFELT, 3.0, exclude_min=True), min_size=200, max_size=200),
)
def test_all_looks_together_stay_within_their_share_of_the_time(first: float, cells: list[float], costs: list[float]) -> None:
    now, spent, dearest, usual = 0.0, 0.0, 0.0, max(first, _UNFELT + 0.001)
    budget = ScanBudget(lambda: now)
    assert not budget.allows(1e9)  # nobody knows what one costs
    budget.measure(usual)
    for seconds, cost in zip(cells, costs, strict=False):
        now += seconds
        if budget.allows(seconds):
            now += cost
            paid_by_its_cell = usual <= OF_ITS_CELL * seconds
            spent, dearest, usual = spent + (not paid_by_its_cell) * cost, max(dearest, cost), cost
            budget.spend(cost)
    assert spent <= SHARE * now + dearest


def test_a_long_cell_pays_for_the_look_after_it() -> None:
    budget = ScanBudget(lambda: 1.0)
    budget.measure(0.3)
    budget.spend(0.3)
    assert not budget.allows(14.0)
    assert budget.allows(15.1)


def test_a_look_that_nobody_feels_is_made_after_any_cell() -> None:
    budget = ScanBudget(lambda: 1.0)
    budget.spend(0.04)
    assert budget.allows(0.0)


def test_a_cheap_look_is_made_after_each_cell_of_a_second() -> None:
    now, looks = 0.0, 0
    budget = ScanBudget(lambda: now)
    budget.measure(0.01)
    for _ in range(8):
        now += 1.2
        if budget.allows(1.2):
            looks += 1
            budget.spend(0.01)
    assert looks == 8


def test_a_dear_look_is_earned_before_it_is_made() -> None:
    now = 0.0
    budget = ScanBudget(lambda: now)
    budget.measure(0.8)
    now = 79.0
    assert not budget.allows(1.0)
    now = 80.1
    assert budget.allows(1.0)
