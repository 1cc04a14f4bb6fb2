"""Looks between the cells of a Run All take at most their share of the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbguard.frontend.sidebar.hub.sampler import SHARE, ScanBudget


@given(
    st.floats(0.001, 3.0),
    st.lists(st.floats(0.0, 5.0), min_size=5, max_size=200),
    st.lists(st.floats(0.001, 3.0), min_size=200, max_size=200),
)
def test_all_looks_together_stay_within_their_share_of_the_time(first: float, cells: list[float], costs: list[float]) -> None:
    now, spent, dearest = 0.0, 0.0, 0.0
    budget = ScanBudget(lambda: now)
    assert not budget.allows  # nobody knows what one costs
    budget.measure(first)
    for seconds, cost in zip(cells, costs, strict=False):
        now += seconds
        if budget.allows:
            now += cost
            spent, dearest = spent + cost, max(dearest, cost)
            budget.spend(cost)
    assert spent <= SHARE * now + dearest


def test_a_cheap_look_is_made_after_each_cell_of_a_second() -> None:
    now, looks = 0.0, 0
    budget = ScanBudget(lambda: now)
    budget.measure(0.01)
    for _ in range(8):
        now += 1.2
        if budget.allows:
            looks += 1
            budget.spend(0.01)
    assert looks == 8


def test_a_dear_look_is_earned_before_it_is_made() -> None:
    now = 0.0
    budget = ScanBudget(lambda: now)
    budget.measure(0.8)
    now = 79.0
    assert not budget.allows
    now = 80.1
    assert budget.allows
