"""The figures of a fit that a later one is compared with, the changes from run to run, and the interval of their ratio."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from random import Random

from nbguard.training.profiler.analysis.report import Comparison, RunChange, Setting
from nbguard.units import counted, format_bytes, format_time

# --- The interval of a ratio of two medians, by resampling batches in whole stretches, since neighbours are alike.


ENOUGH = 20
"""With fewer values than this in a run nothing is said."""

_RESAMPLES = 400


def ratio_interval(now: Sequence[int], before: Sequence[int]) -> tuple[float, float] | None:
    """Return the 95 % interval of median(now) / median(before); None where the values are too few, or drift too much.

    Drawn with a generator of its own, always the same.
    """
    if not (says_something(now) and says_something(before)):
        return None
    random = Random(0)  # noqa: S311 - draws samples, guards no secret
    above, below = list(_medians(now, random)), list(_medians(before, random))
    if not min(below):
        return None
    ratios = sorted(one / other for one, other in zip(above, below, strict=True))
    edge = _RESAMPLES // 40
    return ratios[edge], ratios[-edge - 1]


def says_something(values: Sequence[int]) -> bool:
    """Say whether there are values enough, and enough stretches of them that are not alike."""
    return len(values) >= ENOUGH and len(values) >= 6 * stretch(values)


def median(values: Sequence[int]) -> int:
    """Return the median; of an even number of values the upper of the middle two."""
    return sorted(values)[len(values) // 2]


def _medians(values: Sequence[int], random: Random) -> Iterator[int]:
    """Yield the medians of series as long as this one, put together from stretches of it."""
    length, size = stretch(values), len(values)
    around = [*values, *values[:length]]  # the end goes on at the start: each value is as likely as any other
    for _ in range(_RESAMPLES):
        drawn: list[int] = []
        while len(drawn) < size:
            start = random.randrange(size)
            drawn += around[start : start + length]
        yield median(drawn[:size])


def stretch(values: Sequence[int]) -> int:
    """Return how many values in a row are drawn together: thrice as far as they are alike, and never less than n^⅓."""
    size = len(values)
    ranks = _centred_ranks(values)
    noise = 2 / size**0.5 * sum(rank * rank for rank in ranks)
    alike = 0
    while alike < size // 4 and sum(map(mul, ranks, ranks[alike + 1 :])) > noise:
        alike += 1
    return max(3 * alike, round(math.pow(size, 1 / 3)))


def _centred_ranks(values: Sequence[int]) -> list[float]:
    """Return the place of each value in order of size, less the mean place: one very slow batch then weighs no more."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - len(values)) / 2 for value in values]


LIMIT = 1000
"""Samples kept of the steps. More of them would say less than the machine changes from run to run."""

PHASE_LIMIT = 250
"""Samples kept of each phase: there are many phases, and to compare them should take less than a second."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The times of one phase in the batches of the steady state, in their order."""

    phase: str  # its name
    values: tuple[int, ...]  # nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSamples:
    """One fit that ended."""

    title: str  # of its report
    batches: int  # training batches
    steps: tuple[int, ...]  # nanoseconds of whole batches of the steady state, thinned
    phases: tuple[Samples, ...] = ()  # times of each phase
    peak: int | None = None  # bytes
    settings: tuple[Setting, ...] = ()  # e.g. batch size, workers, device, torch


def fit_samples(
    title: str,
    batches: int,
    steps: Sequence[int],
    phases: Mapping[str, Sequence[int]],
    peak: int | None = None,
    settings: Iterable[Setting] = (),
) -> FitSamples:
    """Return the samples of a fit with these `steps` and `phases`: nanoseconds of each batch of the steady state."""
    samples = (Samples(phase, thinned(values, PHASE_LIMIT)) for phase, values in phases.items())
    return FitSamples(
        title=title, batches=batches, steps=thinned(steps), phases=tuple(samples), peak=peak, settings=tuple(settings)
    )


def thinned(values: Sequence[int], limit: int = LIMIT) -> tuple[int, ...]:
    """Return at most `limit` of the values, evenly spread over them, in their order."""
    if len(values) <= limit:
        return tuple(values)
    return tuple(values[index * len(values) // limit] for index in range(limit))


STEP = "step"
PEAK = "peak memory"
BATCHES = "batches"

_WORK = ("batch size", "device")
"""Settings that make a batch of one run other work than a batch of another."""
_SHARE = 0.01
"""A phase that takes less of the step than this in both runs is left out."""
_ONE_RUN_EACH = "One run each: other work of the machine shows as a difference, too."


def compare(now: FitSamples, before: FitSamples) -> Comparison:
    """Return the changes since the run `before`, the step first."""
    changes: list[RunChange] = []
    if now.steps and before.steps:
        changes = [_change(STEP, now.steps, before.steps), *_phases(now, before)]
    if now.peak is not None and before.peak is not None:
        changes.append(RunChange(name=PEAK, unit="bytes", before=before.peak, now=now.peak))
    if now.batches != before.batches:
        changes.append(RunChange(name=BATCHES, unit="batches", before=before.batches, now=now.batches))
    return Comparison(_sentence(now, before, changes), tuple(changes), tuple(_notes(now, before)))


def words(change: RunChange) -> str:
    """Return a change in words, e.g. 'step 12.4 ms → 8.10 ms (−35 %, 95 % interval −37 … −32 %)'."""
    before, now = (_value(change, value) for value in (change.before, change.now))
    if not change.before:
        return f"{change.name} {before} → {now}"
    share = f"{_percent(change.now / change.before)} %"
    if change.low is not None and change.high is not None:
        share += f", 95 % interval {_percent(change.low)} … {_percent(change.high)} %"
    return f"{change.name} {before} → {now} ({share})"


def _change(name: str, now: tuple[int, ...], before: tuple[int, ...]) -> RunChange:
    change = RunChange(name=name, unit="ns", before=median(before), now=median(now))
    interval = ratio_interval(now, before)
    if interval is None:
        return change
    low, high = interval
    return replace(change, is_significant=not low <= 1 <= high, low=low, high=high)


def _phases(now: FitSamples, before: FitSamples) -> Iterator[RunChange]:
    """Yield the phases that both runs have and that take a part of the step worth naming, the largest difference first."""
    former = {samples.phase: samples.values for samples in before.phases}
    least = _SHARE * max(median(now.steps), median(before.steps))
    both = [(sample.phase, sample.values, former.get(sample.phase, ())) for sample in now.phases]
    changes = [_change(phase, values, others) for phase, values, others in both if values and others]
    notable = [change for change in changes if max(change.now, change.before) >= least]
    yield from sorted(notable, key=lambda change: -abs(change.now - change.before))


def _sentence(now: FitSamples, before: FitSamples, changes: list[RunChange]) -> str:
    if not changes or changes[0].name != STEP:
        return "No step of both runs is known, so there is nothing to compare. Each run needs batches after its warm-up"
    step, fewest = changes[0], min(len(now.steps), len(before.steps))
    if step.is_significant is None:
        why = f"{fewest} batches are too few" if fewest < ENOUGH else "the times drift too much within a run"
        need = f"; {ENOUGH} or more after the warm-up can" if fewest < ENOUGH else ""
        return f"{words(step)}: {why} to say whether that is chance{need}"
    if not step.is_significant:
        return f"no difference that these {fewest} batches could show: {words(step)}"
    return words(step)


def _notes(now: FitSamples, before: FitSamples) -> Iterator[str]:
    """Yield other differences between the runs, and the limits of the comparison, in words."""
    if before.title != now.title:
        yield f"Compared with: {before.title}"
    if now.batches != before.batches:
        former_batches = counted(before.batches, "batch", "batches")
        yield f"Not the same work: {former_batches} before, {now.batches} now; times are per batch."
    former = {setting.name: setting.value for setting in before.settings}
    for setting in now.settings:
        value = former.get(setting.name)
        if value is not None and value != setting.value:
            work = "Not the same work per batch: " if setting.name in _WORK else "Changed: "
            yield f"{work}{setting.name} {value} → {setting.value}"
    if now.steps and before.steps and says_something(now.steps) and says_something(before.steps):
        yield _ONE_RUN_EACH


def _value(change: RunChange, value: int) -> str:
    if change.unit == "ns":
        return format_time(value)
    return format_bytes(value) if change.unit == "bytes" else str(value)


def _percent(ratio: float) -> str:
    """Return a ratio as the difference in percent, with its sign: '−35', '+3', '0'."""
    percent = round(100 * (ratio - 1))
    return f"{percent:+d}".replace("-", "−") if percent else "0"
