"""The time of a fit, with totals that add up to its wall time, and the phases of a batch in the steady state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from nbguard.training.profiler.analysis.report import EpochRow, Group, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batch, Batches, passes
from nbguard.training.profiler.analysis.time.stacks import StackSamples

_WARM_UP = 3
"""Batches before the steady state: libraries choose algorithms, allocators ask for memory, workers start."""
_ENOUGH = 6
"""Batches after the first that it takes to see that each takes longer than the one before."""
_SLOWER = 1.5
"""Times that the last third of them takes of the first;"""
_RISING = 0.85
"""and share of all pairs whose later one must take longer."""
_PARTS, _FEWEST_PARTS, _IN_A_PART = 6, 3, 4
"""Parts that must each have a slower quickest batch than the part before, the fewest, and batches of a part."""
_PAIRED = 60
"""Batches that are compared pair by pair; of more, parts."""


@dataclass(frozen=True, slots=True)
class Slowing:
    """Training batches that each take longer than the one before, in nanoseconds."""

    first: int  # of a batch, early in the fit
    last: int  # of a batch, at its end
    total: int  # that the fit would have saved, had all been as the early ones


def timing_of(batches: Batches) -> Timing:
    """Return where the time went."""
    trained = {batch.loop for batch in batches.batches if batch.is_training}
    training = [batch for batch in batches.batches if batch.loop in trained]  # one that an error cut short, too
    steady = steady_batches(batches)
    complete = [batch for batch in training if batch.is_training and batch.is_complete]
    steps = sorted(batch.step for batch in steady)
    return Timing(
        wall=batches.wall,
        rows=tuple(_rows(batches, trained, steady)),
        batches=len(training),
        warm_up=_warm_up(len(complete)),
        first=complete[0].step if complete else None,
        step=quantile(steps, 0.5),
        step_p95=quantile(steps, 0.95),
        epochs=tuple(_epochs(batches)),
        fits=batches.fits,
    )


def steady_batches(batches: Batches) -> list[Batch]:
    """Return the training batches for medians: complete, after the warm-up, not sampled by nbguard."""
    complete = [batch for batch in batches.batches if batch.is_training and batch.is_complete]
    return [batch for batch in complete[_warm_up(len(complete)) :] if not batch.is_disturbed]


def slowing(batches: Batches, stacks: StackSamples | None = None) -> Slowing | None:
    """Return by how much each training batch takes longer than the one before; None if they do not, or not all the time.

    A stall makes some batches longer, so the quickest of each part of the fit must become slower, part by part. Nor may the
    machine have held up the fit for most of the difference: `stacks` tell how long it did.
    """
    complete = [batch for batch in batches.batches if batch.is_training and batch.is_complete]
    usual = [batch for batch in complete[1:] if not batch.is_disturbed]
    steps = [batch.step for batch in usual]
    third = len(steps) // 3
    if third < _ENOUGH // 3:
        return None
    parts = _parts(steps, max(_FEWEST_PARTS, min(_PARTS, len(steps) // _IN_A_PART)))
    few = steps if len(steps) <= _PAIRED else [round(median(part)) for part in _parts(steps, _PAIRED)]
    pairs = [after > before for at, before in enumerate(few) for after in few[at + 1 :]]
    first, last = (round(median(part)) for part in (steps[:third], steps[-third:]))
    quickest = [min(part) for part in parts]
    is_rising = all(after > before for before, after in pairwise(quickest)) and sum(pairs) >= _RISING * len(pairs)
    if last < _SLOWER * first or not is_rising:
        return None
    if stacks is not None:
        begin, end = usual[-third].start, usual[-1].start + sum(usual[-1].times.values())
        if 2 * stacks.held_up(begin, end) > sum(max(step - first, 0) for step in steps[-third:]):
            return None
    return Slowing(first, last, sum(max(step - first, 0) for step in steps))


def _parts(steps: list[int], count: int) -> list[list[int]]:
    """Return so many parts of a list, as long as each other or one apart."""
    ends = [len(steps) * number // count for number in range(count + 1)]
    return [steps[begin:end] for begin, end in pairwise(ends)]


def quantile(ordered: Sequence[int], share: float) -> int | None:
    """Return the value below which `share` of the ordered values lie, between two of them in proportion; None of none."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (place - low) * (ordered[high] - ordered[low]))


def _warm_up(complete: int) -> int:
    return _WARM_UP if complete > 2 * _WARM_UP else min(1, max(complete - 1, 0))


def _rows(batches: Batches, trained: set[int], steady: list[Batch]) -> Iterator[TimeRow]:
    validation = [batch for batch in batches.batches if batch.loop not in trained]
    for phase, total in _ordered(_total(batch for batch in batches.batches if batch.loop in trained)):
        steadily = sorted(batch.times.get(phase, 0) for batch in steady)
        yield TimeRow(
            phase=phase,
            group="batch",
            total=total,
            callback=batches.callbacks.get(phase, ""),
            median=quantile(steadily, 0.5),
            p95=quantile(steadily, 0.95),
        )
    groups: tuple[tuple[Group, Counter[str]], ...] = (("validation", _total(validation)), ("around", Counter(batches.outside)))
    own = sum(batch.times.get(phase_log.OWN, 0) for batch in batches.batches)
    for group, totals in groups:
        if group == "around" and own + totals[phase_log.OWN]:
            totals[phase_log.OWN] += own
        for phase, total in _ordered(totals):
            yield TimeRow(phase=phase, group=group, total=total, callback=batches.callbacks.get(phase, ""))


def _total(batches: Iterable[Batch]) -> Counter[str]:
    """Return the nanoseconds of batches by phase; nbguard's own time in them is counted around them."""
    sums: Counter[str] = Counter()
    for batch in batches:
        for phase, time in batch.times.items():
            sums[phase] += time
    sums.pop(phase_log.OWN, None)
    return sums


def _ordered(totals: Counter[str]) -> list[tuple[str, int]]:
    """Return phases as they happen in a batch, then callbacks and the rest, the longest first."""
    place = {phase: at for at, phase in enumerate(phase_log.STEP_PHASES)}
    last = {phase_log.OTHER: 1, phase_log.OWN: 2}
    rows = [(phase, total) for phase, total in totals.items() if total]
    return sorted(rows, key=lambda row: (place.get(row[0], len(place)), last.get(row[0], 0), -row[1], row[0]))


def _epochs(batches: Batches) -> Iterator[EpochRow]:
    """Yield the passes over loaders. One with any backward pass is training."""
    training = validation = 0
    for _, members in passes(batches):
        is_training = any(batch.is_training for batch in members)
        training, validation = training + is_training, validation + (not is_training)
        wait = sum(batch.times.get(phase_log.WAIT, 0) for batch in members)
        total = sum(batch.step for batch in members)
        start = members[0].start - batches.start
        yield EpochRow(
            number=training if is_training else validation,
            is_training=is_training,
            batches=len(members),
            total=total,
            wait=wait,
            start=start,
        )
