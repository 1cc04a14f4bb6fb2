"""The figures of a fit that a later one is compared with, the changes from run to run, and the interval of their ratio."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from random import Random
from typing import Literal

from nbguard.training.profiler.analysis.report import (
    Comparison,
    EpochRow,
    FitReport,
    MemoryPoint,
    MemoryReport,
    RunChange,
    Setting,
    TimeRow,
)
from nbguard.units import counted, format_bytes, format_time

# --- The figures of a report that a log of experiments takes, one number each, in seconds, bytes, shares or counts.


Unit = Literal["seconds", "bytes", "ratio", ""]

_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number for a log of experiments."""

    name: str  # e.g. "step_median"
    value: float  # in `unit`
    unit: Unit = ""  # "": a count
    of: str = ""  # the phase, or kind of epoch; "": of the whole fit
    epoch: int | None = None  # number of the pass over a loader; None for all

    @property
    def key(self) -> str:
        """Return its name in a log, e.g. 'nbguard/phase_median_seconds/wait for data'."""
        return "/".join(part for part in ("nbguard", self.full_name, self.of) if part)

    @property
    def full_name(self) -> str:
        """Return the name with its unit, e.g. 'phase_median_seconds'."""
        return f"{self.name}_{self.unit}" if self.unit else self.name


def figures(report: FitReport) -> tuple[Figure, ...]:
    """Return all figures that are known; an unknown one is left out, never 0."""
    return (*_whole(report), *_phase_figures(report), *_memory(report), *_epochs(report), *_ranks(report))


def _whole(report: FitReport) -> Iterator[Figure]:
    timing = report.timing
    times = {"wall": timing.wall, "first_batch": timing.first, "step_median": timing.step, "step_p95": timing.step_p95}
    for name, value in times.items():
        if value is not None:
            yield Figure(name=name, value=value / _NS, unit="seconds")
    yield Figure(name="batches", value=timing.batches)
    yield Figure(name="epochs", value=sum(epoch.is_training for epoch in timing.epochs))
    yield Figure(name="fits", value=timing.fits)
    if timing.busy is not None:
        yield Figure(name="gpu_busy", value=timing.busy, unit="ratio")
    if report.loader is not None and report.loader.gain is not None:
        yield Figure(name="loader_gain", value=report.loader.gain / _NS, unit="seconds")
    if report.loader is not None:
        rates = {
            "items_per_second": report.loader.items_per_second,
            "loader_items_per_second": report.loader.possible_items_per_second,
        }
        for name, rate in rates.items():
            if rate is not None:
                yield Figure(name=name, value=rate)
        if report.loader.reading is not None:
            yield Figure(name="loader_read_per_second", value=report.loader.reading.per_second, unit="bytes")
            yield Figure(name="loader_read_from_storage", value=report.loader.reading.from_storage, unit="ratio")
    if report.scaled_steps:
        yield Figure(name="scaled_steps", value=report.scaled_steps)
        yield Figure(name="skipped_steps", value=report.skipped_steps)
    yield Figure(name="overhead", value=report.overhead.share, unit="ratio")
    yield Figure(name="findings", value=len(report.findings))
    yield Figure(name="problems", value=sum(finding.severity == "problem" for finding in report.findings))
    yield Figure(name="is_partial", value=int(report.is_partial))


def _phase_figures(report: FitReport) -> Iterator[Figure]:
    for row in report.timing.rows:
        phase = _name(row)
        yield Figure(name="phase_total", value=row.total / _NS, unit="seconds", of=phase)
        if report.timing.wall:
            yield Figure(name="phase_share", value=row.total / report.timing.wall, unit="ratio", of=phase)
        for name, value in (("phase_median", row.median), ("phase_p95", row.p95), ("phase_gpu_median", row.gpu)):
            if value is not None:
                yield Figure(name=name, value=value / _NS, unit="seconds", of=phase)


def _name(row: TimeRow) -> str:
    """Return the name of a phase: there may be one of a name in training batches, and one in the others."""
    return row.phase if row.group == "batch" else f"{row.group} {row.phase}"


def _memory(report: FitReport) -> Iterator[Figure]:
    memory = report.memory
    if not isinstance(memory, MemoryReport):
        return
    yield Figure(name="memory_peak", value=memory.peak, unit="bytes")
    for name, value in (("memory_reserved_peak", memory.peak_reserved), ("memory_capacity", memory.capacity)):
        if value is not None:
            yield Figure(name=name, value=value, unit="bytes")
    for phase in memory.phases:
        yield Figure(name="phase_memory_peak", value=phase.peak, unit="bytes", of=phase.phase)
    if memory.growth is not None:
        yield Figure(name="memory_growth_per_batch", value=memory.growth.per_batch, unit="bytes")


def _epochs(report: FitReport) -> Iterator[Figure]:
    memory = epoch_memory(report)
    for epoch in report.timing.epochs:
        kind = _kind(epoch)
        yield Figure(name="epoch_total", value=epoch.total / _NS, unit="seconds", of=kind, epoch=epoch.number)
        yield Figure(name="epoch_wait_for_data", value=epoch.wait / _NS, unit="seconds", of=kind, epoch=epoch.number)
        yield Figure(name="epoch_batches", value=epoch.batches, unit="", of=kind, epoch=epoch.number)
        points = memory.get((kind, epoch.number), ())
        if points:
            last = points[-1]
            yield Figure(
                name="epoch_memory_peak",
                value=max(point.allocated for point in points),
                unit="bytes",
                of=kind,
                epoch=epoch.number,
            )
            yield Figure(name="epoch_memory_end", value=last.allocated, unit="bytes", of=kind, epoch=epoch.number)
            if last.reserved is not None:
                unused = last.reserved - last.allocated
                yield Figure(name="epoch_memory_reserved", value=last.reserved, unit="bytes", of=kind, epoch=epoch.number)
                yield Figure(name="epoch_memory_unused", value=unused, unit="bytes", of=kind, epoch=epoch.number)


def _ranks(report: FitReport) -> Iterator[Figure]:
    """Yield the figures of each rank. Ranks wait for each other in the backward pass, which is shortest on the slowest one."""
    rows = () if report.ranks is None else report.ranks.rows
    backward = [row.backward for row in rows if row.backward is not None]
    for row in rows:
        times = {"step_median": row.step, "wait_for_data": row.wait, "backward_median": row.backward}
        if row.backward is not None and len(backward) > 1:
            times["wait_for_ranks"] = row.backward - min(backward)
        for name, value in times.items():
            if value is not None:
                yield Figure(name=f"rank_{name}", value=value / _NS, unit="seconds", of=f"rank {row.rank}")
        if row.peak is not None:
            yield Figure(name="rank_memory_peak", value=row.peak, unit="bytes", of=f"rank {row.rank}")


def epoch_memory(report: FitReport) -> dict[tuple[str, int], tuple[MemoryPoint, ...]]:
    """Return the readings of memory in each epoch, by its kind and number; an epoch lasts until the next one begins.

    Readings are thinned: the highest of them is the highest level that was seen, and the epoch's peak at most that of the fit.
    """
    memory = report.memory
    known = [epoch for epoch in report.timing.epochs if epoch.start is not None]
    if not isinstance(memory, MemoryReport) or not known:
        return {}
    ordered = sorted(known, key=lambda epoch: epoch.start or 0)
    starts = [epoch.start or 0 for epoch in ordered]
    points: dict[tuple[str, int], list[MemoryPoint]] = {}
    for point in memory.points:
        place = bisect_right(starts, point.at) - 1
        if place >= 0:
            points.setdefault((_kind(ordered[place]), ordered[place].number), []).append(point)
    return {key: tuple(values) for key, values in points.items()}


def _kind(epoch: EpochRow) -> str:
    return "training" if epoch.is_training else "validation"


def summary(report: FitReport) -> str:
    """Return the sentences of the report as Markdown: the first steps, the findings and the notes."""
    lines = [f"**{report.title}**: {report.ending}", ""]
    lines += [f"{number}. {sentence!s}" for number, sentence in enumerate(report.first, 1)]
    for finding in report.findings:
        sentence = finding.what + f" ({finding.evidence}). " + finding.change
        lines.append(f"- {finding.severity}: {str(sentence).rstrip()}")
    return "\n".join([*lines, *(f"- {note}" for note in report.notes)])


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
