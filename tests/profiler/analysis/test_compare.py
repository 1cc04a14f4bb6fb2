"""A comparison says what has changed, and no more than the batches of two runs can show."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.training.profiler.analysis.compare import (
    LIMIT,
    PEAK,
    FitSamples,
    compare,
    fit_samples,
    ratio_interval,
    stretch,
    thinned,
    words,
)
from nbguard.training.profiler.analysis.report import Setting
from nbguard.training.profiler.analysis.time import phase_log

MIB = 1 << 20


def _noisy(median: float, batches: int, seed: int, spread: float = 0.05) -> list[int]:
    drawn = random.Random(seed)
    return [round(median * drawn.lognormvariate(0, spread)) for _ in range(batches)]


def _drifting(batches: int, seed: int, memory: float = 0.9) -> list[int]:
    """Times of which each is near the one before: the machine is slower for a while, then faster."""
    drawn, x, values = random.Random(seed), 0.0, []
    for _ in range(batches):
        x = memory * x + drawn.gauss(0, 0.05)
        values.append(round(1e7 * (1 + max(x, -0.9))))
    return values


def _run(step: float, batches: int = 60, seed: int = 1, **facts: object) -> FitSamples:
    parts = {phase_log.FORWARD: _noisy(3e6, batches, seed + 50), phase_log.WAIT: _noisy(step - 3e6, batches, seed + 90)}
    run = fit_samples("In[1] · fastai fit", batches + 3, _noisy(step, batches, seed), parts, 100 * MIB)
    return replace(run, **facts)  # type: ignore[arg-type]


def test_a_gain_is_told_with_its_interval() -> None:
    found = compare(_run(8.1e6, seed=2), _run(12.4e6))
    step = found.changes[0]

    assert step.is_significant is True
    assert step.low is not None
    assert step.high is not None
    assert step.low < step.now / step.before < step.high < 0.75
    assert found.sentence == words(step)
    assert found.sentence.startswith("step 12.")
    assert "95 % interval −" in found.sentence


def test_the_phase_that_changed_comes_first_and_the_other_shows_nothing() -> None:
    _, first, second, peak = compare(_run(8.1e6, seed=2), _run(12.4e6)).changes

    assert (first.name, first.is_significant) == (phase_log.WAIT, True)
    assert (second.name, second.is_significant) == (phase_log.FORWARD, False)
    assert (peak.name, peak.before, peak.now, peak.is_significant) == (PEAK, 100 * MIB, 100 * MIB, None)


def test_the_same_again_is_no_difference() -> None:
    found = compare(_run(12.4e6, 40, seed=3), _run(12.4e6, 40, seed=4))

    assert found.changes[0].is_significant is False
    assert found.sentence.startswith("no difference that these 40 batches could show: step 12.")


def test_few_batches_say_that_they_are_few() -> None:
    found = compare(_run(6e6, 12), _run(12e6, 12))

    assert found.changes[0].is_significant is None
    assert "12 batches are too few to say whether that is chance; 20 or more after the warm-up can" in found.sentence


def test_times_that_drift_say_nothing() -> None:
    rising = tuple(range(10**7, 2 * 10**7, 10**5))

    found = compare(_run(9e6, 100, steps=rising), _run(12e6, 100))

    assert found.changes[0].is_significant is None
    assert "the times drift too much within a run" in found.sentence


def test_other_work_is_named() -> None:
    def settings(*values: str) -> tuple[Setting, ...]:
        return tuple(map(Setting, ("batch size", "workers", "torch"), values))

    before = _run(12e6, settings=settings("64", "0", "2.13"))
    now = _run(6e6, settings=settings("32", "2", "2.13"), batches=90, title="In[2] · fastai fit")
    notes = compare(now, before).notes

    assert "Compared with: In[1] · fastai fit" in notes
    assert "Not the same work: 63 batches before, 93 now; times are per batch." in notes
    assert "Not the same work per batch: batch size 64 → 32" in notes
    assert "Changed: workers 0 → 2" in notes
    assert not any("torch" in note for note in notes)


def test_a_run_without_a_steady_state_is_not_compared() -> None:
    assert "nothing to compare" in compare(_run(1e7, steps=()), _run(1e7)).sentence


def test_a_phase_of_no_time_before_is_told_without_a_ratio() -> None:
    before = _run(1e7, steps=(0,) * 30)

    assert words(compare(_run(1e7), before).changes[0]).startswith("step 0 ns → ")


@pytest.mark.parametrize(("series", "batches"), [(_noisy, 40), (_noisy, 200), (_drifting, 600)])
def test_two_runs_of_one_kind_differ_no_more_often_than_they_should(series: object, batches: int) -> None:
    def draw(seed: int) -> list[int]:
        return _noisy(1e7, batches, seed) if series is _noisy else _drifting(batches, seed)

    pairs = 40 if batches < 600 else 20
    found = [ratio_interval(draw(seed), draw(1000 + seed)) for seed in range(pairs)]
    told = [interval for interval in found if interval]

    assert len(told) > pairs // 2
    assert sum(low > 1 or high < 1 for low, high in told) <= 0.2 * len(told)  # some 70 % where neighbours count for themselves


def test_values_that_are_alike_are_drawn_together() -> None:
    assert stretch(_noisy(1e7, 200, seed=1)) < stretch(_drifting(200, seed=1))
    assert stretch([7] * 100) < 10


def test_the_generator_of_the_program_is_left_alone() -> None:
    state = random.getstate()

    first = compare(_run(9e6, seed=5), _run(1e7))
    state, before = random.getstate(), state

    assert state == before
    assert compare(_run(9e6, seed=5), _run(1e7)) == first


@given(st.lists(st.integers(), max_size=3 * LIMIT))
def test_thinned_values_are_few_in_order_and_spread(values: list[int]) -> None:
    numbered = list(range(len(values)))
    kept = thinned(numbered)

    assert len(kept) == min(len(values), LIMIT)
    assert list(kept) == sorted(set(kept))
    assert not kept or (kept[0] == 0 and kept[-1] >= len(values) - 1 - len(values) // LIMIT)
