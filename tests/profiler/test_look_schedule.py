"""Which batches are looked at, by their numbers."""

from __future__ import annotations

from nbguard.training.profiler.record.log import SampleSchedule


def looked_at(schedule: SampleSchedule, first: int, last: int) -> list[int]:
    """Return the batches that are looked at, as a recorder asks for them."""
    found, number = [], first
    while number <= last:
        choice = schedule.choose(number)
        if choice.is_looked_at:
            found.append(number)
        assert choice.next > number
        number = choice.next
    return found


def test_batches_are_looked_at_more_and_more_rarely() -> None:
    assert looked_at(SampleSchedule(), 1, 700) == [
        *range(1, 33),  # the first ones all, then each 13th
        *(39, 52, 65, 78, 91, 104, 117),
        *(148, 185, 222),  # each 37th
        *range(259, 263),  # four in a row: the fit is twice as long as 128
        *(296, 333, 370, 407, 444, 481),
        *range(518, 522),  # and again; then each 101st
        *(606,),
    ]


def test_batches_that_are_asked_for_are_looked_at_and_another_fit_begins_anew() -> None:
    schedule = SampleSchedule()
    assert looked_at(schedule, 1, 40) == [*range(1, 33), 39]

    schedule.look_up_to(43)
    assert looked_at(schedule, 41, 60) == [41, 42, 43, 52]

    schedule.begin(60)
    assert looked_at(schedule, 61, 110) == [*range(61, 93), 104]
