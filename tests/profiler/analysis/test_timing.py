"""A log of a fit divided into batches, on logs short enough to see through; and on any log, that nothing is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.batches import (
    Batches,
    Slowing,
    divide,
    quantile,
    slowing,
    steady_batches,
    timing_of,
)
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, PhaseLog
from nbguard.training.profiler.analysis.time.stacks import StackSamples

KINDS: tuple[BoundaryKind, ...] = ("batch", "end", "loss", "step", "fit", "disturbed", "cut")
SHORT = {"w": phases.WAIT, "f": phases.FORWARD, "b": phases.BACKWARD, "s": phases.STEP, "o": phases.OTHER, "n": phases.OWN}


def log(words: str) -> PhaseLog:
    """Return a log: `w3` waits 3 ns, `>1` the next batch of loader 1, `/1` its end, `|` a step, `L` a loss, `!` disturbed,
    `X` cut.
    """
    labels = tuple(dict.fromkeys(SHORT.values()))
    codes, times, boundaries, now = [], [], [], 100
    for word in words.split():
        kind, rest = word[0], word[1:]
        if kind in SHORT:
            now += int(rest)
            codes.append(labels.index(SHORT[kind]))
            times.append(now)
        else:
            boundary: BoundaryKind = {">": "batch", "/": "end", "|": "step", "!": "disturbed", "L": "loss", "X": "cut"}[kind]  # type: ignore[assignment]
            boundaries.append(Boundary(len(codes), boundary, int(rest or 0)))
    return PhaseLog(start=100, codes=codes, times=times, labels=labels, boundaries=tuple(boundaries))


def told(words: str) -> list[tuple[int, dict[str, int], bool]]:
    names = {phase: short for short, phase in SHORT.items()}
    found = divide(log(words)).batches
    return [
        (batch.loop, {names[phase]: time for phase, time in batch.times.items()}, batch.is_complete and batch.is_training)
        for batch in found
    ]


def outside(words: str) -> dict[str, int]:
    names = {phase: short for short, phase in SHORT.items()}
    return {names[phase]: time for phase, time in divide(log(words)).outside.items() if time}


def test_a_loop_over_a_loader() -> None:
    words = "o5 >1 w1 f2 b3 s4 | o1 >1 w2 f2 b2 s2 | >1 w7 /1 o9"

    assert told(words) == [
        (1, {"w": 1, "f": 2, "b": 3, "s": 4, "o": 1}, True),
        (1, {"w": 2, "f": 2, "b": 2, "s": 2}, True),
    ]
    assert outside(words) == {"o": 14, "w": 7}


def test_an_iterator_that_is_used_again_is_a_new_pass() -> None:
    words = ">1 w1 b1 >1 w1 /1 o1 >1 w1 b1 >1 w1 /1"

    assert [batch[0] for batch in told(words)] == [1, 2]
    assert [epoch.number for epoch in timing_of(divide(log(words))).epochs] == [1, 2]


def test_a_loader_that_is_asked_one_batch_ahead() -> None:
    words = ">1 w5 >1 w1 f1 b1 s1 | o1 >1 w1 f2 b2 s2 | o1 >1 w1 /1 f3 b3 s3 | o9"

    assert told(words) == [
        (1, {"w": 6, "f": 1, "b": 1, "s": 1, "o": 1}, True),
        (1, {"w": 1, "f": 2, "b": 2, "s": 2, "o": 1}, True),
        (1, {"w": 1, "f": 3, "b": 3, "s": 3}, True),
    ]
    assert outside(words) == {"o": 9}


def test_a_loader_that_nobody_trains_on_has_as_many_batches_as_it_gave() -> None:
    words = ">1 w1 o1 >1 w1 o1 >1 w1 o1 >1 w1 /1 o1 >2 w1 b1 >2 w1 b1 >2 w1 /2"

    assert [batch[0] for batch in told(words)] == [1, 1, 1, 2, 2]


def test_a_pass_for_which_no_model_is_called_is_no_validation() -> None:
    """SentenceTransformer.fit makes a data set of its loader first; other loops compute the mean and deviation of the data."""
    words = ">1 w5 o5 n1 >1 w5 o7 >1 w1 /1 >2 w1 f2 b3 >2 w1 f2 b3 >2 w1 /2 o1 >3 w1 f2 >3 w1 f2 >3 w1 /3"
    divided = divide(log(words), [103])

    assert [batch[0] for batch in told(words)] == [2, 2, 3, 3]
    assert outside(words) == {"w": 13, "o": 13, "n": 1}
    assert [moment.loop for moment in divided.moments] == [None]
    assert [(epoch.is_training, epoch.batches) for epoch in timing_of(divided).epochs] == [(True, 2), (False, 2)]


def test_an_evaluation_inside_a_batch_interrupts_it() -> None:
    words = ">1 w1 f1 b1 >2 w1 f5 >2 w1 f5 >2 w1 /2 o3 s2 | >1 w1 /1"

    assert told(words) == [
        (1, {"w": 1, "f": 1, "b": 1, "o": 3, "s": 2}, True),
        (2, {"w": 1, "f": 5}, False),
        (2, {"w": 1, "f": 5}, False),
    ]
    assert outside(words) == {"w": 2}


def test_two_loaders_side_by_side_are_one_loop() -> None:
    words = ">1 w1 >2 w2 f1 b1 >1 w1 >2 w2 f1 b1 >1 w1 /1 o1"

    assert told(words) == [(1, {"w": 3, "f": 1, "b": 1}, True), (1, {"w": 3, "f": 1, "b": 1}, True)]
    assert outside(words) == {"w": 1, "o": 1}


def test_a_first_batch_taken_to_look_at_is_no_loop_around_the_fit() -> None:
    words = ">1 w1 o2 >2 w1 b1 >2 w1 b1 >2 w1 /2 o50"

    assert told(words) == [(2, {"w": 1, "b": 1}, True), (2, {"w": 1, "b": 1}, True)]
    assert outside(words) == {"w": 2, "o": 52}


def test_a_loop_that_was_left_inside_another() -> None:
    words = ">1 w1 b1 >2 w1 f1 >2 w1 f1 >1 w1 b1 >1 w1 /1"

    assert [batch[0] for batch in told(words)] == [1, 2, 2, 1]
    assert told(words)[0] == (1, {"w": 1, "b": 1}, True)


def test_an_evaluation_of_one_batch_that_asks_for_no_second_is_a_pass_each_time() -> None:
    """As Ignite's engines do, which count their batches."""
    words = ">1 w1 f1 b1 s1 | >2 w1 f5 o2 >1 w1 /1 >3 w1 f1 b1 s1 | >4 w1 f5 o2 >3 w1 /3"
    timing = timing_of(divide(log(words)))

    assert [batch[0] for batch in told(words)] == [1, 2, 3, 4]
    assert told(words)[1] == (2, {"w": 1, "f": 5, "o": 2}, False)
    assert [(epoch.is_training, epoch.number) for epoch in timing.epochs] == [(True, 1), (False, 1), (True, 2), (False, 2)]


@pytest.mark.parametrize(
    "words",
    [
        ">1 w1 f1 >2 w1 f1 b1 s1 | >1 w1 /1",  # a second batch for the same loss
        ">1 w1 f1 >2 w1 f1 L o1 >1 w1 /1",
        ">1 w1 f1 b1 s1 | >2 w1 o3 >1 w1 /1",  # no model was asked about it
        ">1 w1 >2 w1 f1 >1 w1 /1",  # two loaders side by side
    ],
)
def test_a_batch_taken_inside_another_is_a_part_of_it(words: str) -> None:
    assert [batch[0] for batch in told(words)] == [1]


def test_a_batch_that_was_stopped_at_its_loss_is_a_training_batch() -> None:
    (batch,) = divide(log(">1 w1 f1 L o1")).batches

    assert (batch.is_training, batch.is_complete) == (True, False)


def test_without_a_loader_a_step_ends_a_batch() -> None:
    words = "o9 f1 b1 s1 | o1 f1 b1 s1 | o4"

    assert told(words) == [(0, {"f": 1, "b": 1, "s": 1}, True), (0, {"o": 1, "f": 1, "b": 1, "s": 1}, True)]
    assert outside(words) == {"o": 13}


def test_where_nothing_steps_a_loss_begins_a_batch() -> None:
    """Parameters that are changed by hand."""
    words = "o5 f2 L b3 o1 f2 L b4 o1 f2 L b5 o9"

    assert [batch["b"] for _, batch, _ in told(words)] == [3, 4, 5]
    assert [is_whole for _, _, is_whole in told(words)] == [True, True, False]
    assert timing_of(divide(log(words))).batches == 3


def test_an_error_leaves_a_batch_that_counts_but_is_no_measure() -> None:
    words = " ".join([">1 w1 f1 b8"] * 9) + " >1 w1 f1 b500"
    timing = timing_of(divide(log(words)))

    assert timing.batches == 10
    assert (timing.step, timing.step_p95) == (10, 10)
    assert timing.wall == sum(row.total for row in timing.rows) == 9 * 10 + 502


def test_the_first_batch_of_a_pass_that_an_error_cut_before_its_loss_was_to_train() -> None:
    (batch,) = divide(log(">1 w1 f2 o3 X o9")).batches
    (of_validation,) = divide(log(">1 w1 f2 o3")).batches

    assert (batch.is_training, batch.is_complete) == (True, False)
    assert not of_validation.is_training
    timing = timing_of(divide(log(">1 w1 f2 o3 X o9")))
    assert (timing.batches, [row.group for row in timing.rows]) == (1, ["batch"] * 3)
    assert [batch.is_training for batch in divide(log(">1 w1 f2 >1 w1 f2 X")).batches] == [False, False]  # a validation
    assert not divide(log("f2 o3 X")).batches


def test_a_pass_that_was_left_before_anything_was_done_with_its_first_batch_is_none() -> None:
    words = ">1 w1 o3"

    assert told(words) == []
    assert outside(words) == {"w": 1, "o": 3}


def test_warm_up_and_disturbed_batches_are_left_out_of_medians() -> None:
    words = ">1 b900 " * 3 + ">1 b10 " * 4 + ">1 ! b700 " * 4 + ">1 b10 " * 2 + ">1 b1"
    timing = timing_of(divide(log(words)))

    assert (timing.warm_up, timing.first, timing.step) == (3, 900, 10)
    assert len(steady_batches(divide(log(words)))) == 6


def test_what_nbguard_takes_is_a_row_of_its_own() -> None:
    timing = timing_of(divide(log(">1 w1 b1 n50 >1 w1 b1 n60 >1 /1")))

    assert [(row.group, row.total) for row in timing.rows if row.phase == phases.OWN] == [("around", 110)]
    assert timing.step == 2


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([90, 10, 20, 30, 40, 50, 60], Slowing(15, 55, 5 + 15 + 25 + 35 + 45)),
        ([90, 10, 20, 30, 40, 50], None),  # too few after the first
        ([10] * 12, None),
        ([90, 10, 10, 10, 10, 11, 11, 12, 12], None),  # slower, but not by much
        ([10] * 9 + [40] * 4, None),  # once for good, as where a cache is full
        ([10, 60, 10, 60, 10, 60, 10, 60, 10, 60, 60, 60], None),
        ([90, 60, 50, 40, 30, 20, 10], None),
    ],
)
def test_batches_become_slower_where_each_takes_longer_than_the_one_before(steps: list[int], expected: Slowing | None) -> None:
    assert slowing(divide(log("".join(f">1 b{step} " for step in steps) + ">1 w1 /1"))) == expected


def _of(steps: list[int]) -> Batches:
    return divide(log("".join(f">1 b{step} " for step in steps) + ">1 w1 /1"))


@pytest.mark.parametrize("count", [13, 25, 200])
def test_what_a_busy_machine_does_to_batches_is_not_taken_for_growth(count: int) -> None:
    rng = random.Random(0)
    growing = [1000 + 10_000 * number // count for number in range(count)]
    assert slowing(_of(growing)) is not None
    for _ in range(100):
        flat = [1000 + rng.randrange(100) for _ in range(count)]
        begin = rng.randrange(count)
        stalled = [step * (rng.randrange(1, 9) if rng.random() < 0.5 else 1) for step in flat]  # every second batch
        from_then = [step * (2 if number >= begin else 1) for number, step in enumerate(flat)]  # another program began
        assert [slowing(_of(steps)) for steps in (flat, stalled)] == [None, None]
        assert slowing(_of(from_then)) is None or count < 25  # too few tell the one from the other in each case


def test_batches_that_were_held_up_for_most_of_the_difference_are_not_slower_themselves() -> None:
    batches = _of([1000 + 100 * number for number in range(40)])
    moments = tuple(range(0, 200_000, 100))
    assert slowing(batches, StackSamples(moments=moments, waits=(0,) * len(moments))) is not None
    assert slowing(batches, StackSamples(moments=moments, waits=tuple(at * 9 // 10 for at in moments))) is None


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert quantile([7], 0.95) == 7
    assert quantile([0, 10], 0.5) == 5
    assert quantile(range(101), 0.95) == 95


@given(
    st.lists(st.one_of(st.tuples(st.integers(0, 5), st.integers(0, 99)), st.tuples(st.sampled_from(KINDS), st.integers(1, 4))))
)
def test_every_nanosecond_is_somewhere_whatever_the_log(events: list[tuple[int | str, int]]) -> None:
    labels = tuple(SHORT.values())
    codes, times, boundaries, now = [], [], [], 0
    for kind, number in events:
        if isinstance(kind, int):
            now += number
            codes.append(kind)
            times.append(now)
        else:
            boundaries.append(Boundary(len(codes), kind, number))  # type: ignore[arg-type]
    marks = PhaseLog(start=0, codes=codes, times=times, labels=labels, boundaries=tuple(boundaries))

    divided, timing = divide(marks), timing_of(divide(marks))

    inside = sum(sum(batch.times.values()) for batch in divided.batches)
    assert inside + sum(divided.outside.values()) == now
    assert sum(row.total for row in timing.rows) == timing.wall == now
    assert all(time >= 0 for batch in divided.batches for time in batch.times.values())
