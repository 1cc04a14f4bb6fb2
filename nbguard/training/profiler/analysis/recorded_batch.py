"""The memory of a fit at its peak by category, and one batch recorded allocation by allocation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from nbguard.training.profiler.analysis.report import Category, FitFinding, MemoryReport, PhasePeak, StackPeak
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import MiB, format_bytes

# --- The memory of a fit at its peak by category, from counters and from sizes of tensors. Categories add up to the peak.
# Pure.


PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
STATE = "optimizer state"
INPUTS = "inputs"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
BEFORE = "before the fit"
OTHER = "other"
ORDER = (PARAMETERS, BUFFERS, GRADIENTS, STATE, INPUTS, ACTIVATIONS, TEMPORARIES, BEFORE, OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Sizes of the tensors that stay from batch to batch, in bytes; each storage is counted once."""

    parameters: int = 0  # of the modules that were called
    buffers: int = 0  # of the same modules
    gradients: int = 0  # before an optimizer step
    kept_gradients: int = 0  # of these, there before the forward pass, too
    state: int = 0  # of the optimizer
    inputs: int = 0  # arguments of the outermost module, and targets of a Learner
    spent: int = 0  # of memory from before the fit: its kind, or freed since


@dataclass(frozen=True, slots=True)
class Shape:
    """The counters of one batch, in bytes: before its forward pass, after its loss (None without one), and at its peak."""

    before: int
    after_loss: int | None
    peak: int
    phase: str  # of the peak


def categories(peak: int, start: int, stock: Stock | None, shape: Shape | None, *, grows: bool = False) -> tuple[Category, ...]:
    """Return the bytes of each kind at the peak; they add up to `peak`.

    Args:
        peak: the most that was allocated.
        start: bytes allocated before the fit.
        stock: sizes of the tensors that stay from batch to batch, or None if unknown.
        shape: of the batch with the highest peak that was followed, or None without any.
        grows: memory grows from batch to batch: then the bytes beyond that batch's peak have grown since.
    """
    left = peak
    parts = []
    for name, nbytes in _wanted(start, stock, shape, peak - shape.peak if grows and shape is not None else 0):
        taken = min(nbytes, left)
        left -= taken
        if taken > 0:
            parts.append(Category(name, taken))
    if left:
        known = stock is not None and shape is not None
        parts.append(Category(TEMPORARIES if known else "of the fit, not told apart", left))
    return in_order(parts)


def in_order(parts: Iterable[Category]) -> tuple[Category, ...]:
    """Return categories in the order of display: lasting ones, passing ones, the rest."""
    return tuple(sorted(parts, key=lambda category: ORDER.index(category.name) if category.name in ORDER else len(ORDER)))


def _wanted(start: int, stock: Stock | None, shape: Shape | None, grown: int) -> Iterator[tuple[str, int]]:
    """Yield (category, bytes), the best known first: where they exceed the peak, the last get the rest."""
    if stock is None or shape is None:
        yield BEFORE, start
        return
    yield PARAMETERS, stock.parameters
    yield BUFFERS, stock.buffers
    yield STATE, stock.state
    yield INPUTS, stock.inputs
    staying = stock.parameters + stock.buffers + stock.state + stock.inputs + stock.kept_gradients
    unnamed = max(shape.before - staying, 0)
    older = min(max(start - stock.spent, 0), unnamed)
    yield BEFORE, older
    yield OTHER, unnamed - older + max(grown, 0)
    yield from _passing(stock, shape)


def _passing(stock: Stock, shape: Shape) -> Iterator[tuple[str, int]]:
    """Yield gradients and activations. In the backward pass these give way to those: the larger ones were there in full."""
    activations = ACTIVATIONS, 0 if shape.after_loss is None else max(shape.after_loss - shape.before, 0)
    gradients = GRADIENTS, stock.gradients
    if shape.phase in (phase_log.FORWARD, phase_log.LOSS):
        yield GRADIENTS, stock.kept_gradients
        yield activations
    elif shape.phase in (phase_log.STEP, phase_log.ZERO_GRAD):
        yield gradients
    else:
        yield from sorted((gradients, activations), key=lambda part: -part[1])


_MOST_SITES = 12
_LARGE = 16 * MiB
"""Least bytes of a line's temporary tensors that are mentioned;"""
_PART = 0.1
"""and their share of the peak."""
_MOST_OTHERS = 2
_SAME = 0.99
"""A phase's peak in the recorded batch is its peak, unless more than this share of it was seen in another one."""
BEYOND = "beyond the recorded batch"
_LOADING = (phase_log.WAIT, phase_log.TO_DEVICE, phase_log.TRANSFORMS)


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """A block of `nbytes` was allocated at `site`; or, if `nbytes` is 0, the one of that number was freed."""

    block: int  # number of the block
    nbytes: int = 0  # 0 if it was freed
    site: str = ""  # the line that allocated it, e.g. "In[3], line 5"


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """After so many events `phase` ended, and the device's own counter said `level` bytes. The first opens the batch."""

    position: int  # events before it
    phase: str  # that ended
    level: int  # bytes allocated then, by the device's own counter


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """The peak of a recorded batch, in bytes: by phase, by category and by line."""

    peak: int  # the most that was allocated at once
    phase: str  # that it fell in
    phases: Mapping[str, int]  # the peak of each phase
    categories: tuple[Category, ...]  # of the bytes at the peak; they add up to it
    stacks: tuple[StackPeak, ...]  # lines that allocated them, the largest first
    passing: tuple[StackPeak, ...] = ()  # of them, lines outside of the model whose bytes go again without a backward pass


def read_batch(
    events: Sequence[AllocationEvent], marks: Sequence[PhaseEnd], names: Mapping[int, str], stock: Stock, start: int
) -> RecordedBatch:
    """Return the peaks of a recorded batch.

    Args:
        events: from some time before the batch on: of a block that is older nothing is known but the level it is part of.
        marks: of this batch, two at least.
        names: the category of blocks that were found to be a model's, an optimizer's or inputs, or saved for a backward pass.
        stock: bytes of these categories, older blocks included.
        start: bytes allocated before the fit.
    """
    peak, at, phase, by_phase = _peaks(events, marks)
    living: dict[int, tuple[AllocationEvent, int]] = {}
    for position, event in enumerate(events[:at]):
        if event.nbytes:
            living[event.block] = event, position
        else:
            living.pop(event.block, None)
    kinds = _Kinds(events, marks, names)
    by_kind: dict[str, int] = {}
    by_site: dict[tuple[str, str], int] = {}
    passing: dict[str, int] = {}
    passes = kinds.passing_sites(events)
    for event, position in living.values():
        kind = kinds.of(event, position)
        by_kind[kind] = by_kind.get(kind, 0) + event.nbytes
        by_site[event.site, kind] = by_site.get((event.site, kind), 0) + event.nbytes
        if event.site in passes and kind in (OTHER, TEMPORARIES) and kinds.is_of_loop(position):
            passing[event.site] = passing.get(event.site, 0) + event.nbytes
    older = peak - sum(by_kind.values())
    for kind, nbytes in _older(max(older, 0), stock, by_kind, start):
        by_kind[kind] = by_kind.get(kind, 0) + nbytes
    by_kind[OTHER] = by_kind.get(OTHER, 0) + min(older, 0)
    sites = sorted(((site, nbytes, kind) for (site, kind), nbytes in by_site.items() if site), key=lambda row: -row[1])
    return RecordedBatch(
        peak=peak,
        phase=phase,
        phases=by_phase,
        categories=in_order(Category(kind, nbytes) for kind, nbytes in by_kind.items() if nbytes),
        stacks=tuple(StackPeak(*row) for row in sites[:_MOST_SITES]),
        passing=tuple(StackPeak(*row) for row in sorted(passing.items(), key=lambda row: -row[1]) if row[0]),
    )


def passing_finding(batch: RecordedBatch | None) -> Iterator[FitFinding]:
    """Yield the line whose temporary tensors take most of the peak, where that is much."""
    if batch is None or not batch.passing:
        return
    largest, *others = batch.passing
    if largest.nbytes < max(_LARGE, _PART * batch.peak):
        return
    share = f"{largest.nbytes / batch.peak:.0%} of the peak of {format_bytes(batch.peak)}"
    more = [f"{format_bytes(row.nbytes)} at {row.site}" for row in others[:_MOST_OTHERS] if row.nbytes >= _LARGE]
    yield FitFinding(
        kind="temporaries",
        severity="advice",
        what=f"{largest.site} makes {format_bytes(largest.nbytes)} of temporary tensors in each batch",
        evidence=f"{share}; no backward pass needs them" + (f" · likewise {', '.join(more)}" if more else ""),
        change="compute it in smaller parts, write into a tensor that is made before the loop (`out=`), or `del` it as soon as "
        "it has been used",
        nbytes=largest.nbytes,
    )


def with_batch(report: MemoryReport, batch: RecordedBatch) -> MemoryReport:
    """Return the report with the more exact figures of the recorded batch. Its categories add up again."""
    peaks = {phase_peak.phase: phase_peak.peak for phase_peak in report.phases}
    ordered = dict.fromkeys((*peaks, *batch.phases))
    exact = {
        phase: max(most, peaks.get(phase, 0)) for phase, most in batch.phases.items() if most >= _SAME * peaks.get(phase, 0)
    }
    peak = max(report.peak, batch.peak)
    beyond = (Category(BEYOND, peak - batch.peak),) if peak > batch.peak else ()
    return replace(
        report,
        peak=peak,
        peak_phase=batch.phase if batch.peak >= report.peak else report.peak_phase,
        phases=tuple(PhasePeak(phase, exact.get(phase, peaks.get(phase, 0)), phase in exact) for phase in ordered),
        categories=(*batch.categories, *beyond),
        stacks=batch.stacks,
    )


def _peaks(events: Sequence[AllocationEvent], marks: Sequence[PhaseEnd]) -> tuple[int, int, str, dict[str, int]]:
    """Return (the peak, the number of events until then, its phase, the peak of each phase)."""
    sizes = {event.block: event.nbytes for event in events if event.nbytes}
    peak, at, where = marks[0].level, marks[0].position, marks[0].phase
    by_phase: dict[str, int] = {}
    for before, mark in pairwise(marks):
        level = before.level
        levels = [(level, before.position)]
        for position in range(before.position, mark.position):
            event = events[position]
            level += event.nbytes or -sizes.get(event.block, 0)
            levels.append((level, position + 1))
        high, position = max((*levels, (mark.level, mark.position)), key=lambda reading: reading[0])
        by_phase[mark.phase] = max(by_phase.get(mark.phase, 0), high)
        if high > peak:
            peak, at, where = high, position, mark.phase
    return peak, at, where, by_phase


class _Kinds:
    """Tells the category of a block: by its name, or by the phase of its allocation and whether it outlived that."""

    def __init__(self, events: Sequence[AllocationEvent], marks: Sequence[PhaseEnd], names: Mapping[int, str]) -> None:
        self._marks = marks
        self._names = names
        self._has_graph = ACTIVATIONS in names.values()  # then what is not named so was saved for no backward pass
        self._ends = {event.block: position for position, event in enumerate(events) if not event.nbytes}

    def passing_sites(self, events: Sequence[AllocationEvent]) -> frozenset[str]:
        """Return the lines with a block that was freed outside of backward passes, as far as the record goes."""
        freed = ((event, self._ends.get(event.block)) for event in events if event.nbytes)
        return frozenset(event.site for event, end in freed if end is not None and self._phase_at(end) != phase_log.BACKWARD)

    def is_of_loop(self, position: int) -> bool:
        """Say whether the loop's own code ran at an event, between the model's calls and the steps of the optimizer."""
        phase = self._phase_at(position)
        return phase == phase_log.LOSS or phase not in (*phase_log.STEP_PHASES, *_LOADING)

    def _is_freed_in_backward(self, event: AllocationEvent) -> bool:
        end = self._ends.get(event.block)
        return end is not None and self._phase_at(end) == phase_log.BACKWARD

    def _phase_at(self, position: int) -> str:
        return next((mark.phase for mark in self._marks if position < mark.position), "")

    def of(self, event: AllocationEvent, position: int) -> str:
        """Return the category of a block that was allocated by the event at `position`."""
        if event.block in self._names:
            return self._names[event.block]
        mark = next((mark for mark in self._marks if position < mark.position), None)
        if mark is None or position < self._marks[0].position:
            return OTHER
        if mark.phase in _LOADING:
            return INPUTS
        outlives = self._ends.get(event.block, mark.position) >= mark.position
        if mark.phase in (phase_log.FORWARD, phase_log.LOSS) and outlives:
            is_saved = mark.phase == phase_log.FORWARD or not self._has_graph
            return ACTIVATIONS if is_saved or self._is_freed_in_backward(event) else TEMPORARIES
        return TEMPORARIES if mark.phase in phase_log.STEP_PHASES else OTHER


def _older(nbytes: int, stock: Stock, by_kind: Mapping[str, int], start: int) -> Iterator[tuple[str, int]]:
    """Yield (category, bytes) of the blocks that are older than the recording; they add up to `nbytes`."""
    wanted = (
        (PARAMETERS, stock.parameters),
        (BUFFERS, stock.buffers),
        (STATE, stock.state),
        (GRADIENTS, stock.kept_gradients),
        (INPUTS, stock.inputs),
        (BEFORE, max(start - stock.spent, 0)),
    )
    for kind, most in wanted:
        taken = min(max(most - by_kind.get(kind, 0), 0), nbytes)
        nbytes -= taken
        yield kind, taken
    yield OTHER, nbytes
