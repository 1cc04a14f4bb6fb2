"""The log of a fit divided into batches, with the nanoseconds of each, and the callbacks that take a share of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median

from nbguard.training.profiler.analysis.report import EpochRow, FitFinding, Group, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.phase_log import Boundary, PhaseLog
from nbguard.training.profiler.analysis.time.stacks import StackSamples
from nbguard.units import format_time

# --- Callbacks that take a share of every batch.


_SHARE, _LITTLE = 0.05, 0.01
"""Least shares of a batch of a callback that is worth a change, or is mentioned."""
_NOTICED = 500_000
"""Nanoseconds of a batch: less is not mentioned."""


_ENOUGH = 40
"""Least batches whose 95th percentile speaks of several; with few, one that the machine held up is no habit."""
_RARE = 5
"""Times the median that the mean must be for a callback to be one that works in some batches only."""


def slow_callbacks(timing: Timing, of_library: Collection[str] = ()) -> Iterator[FitFinding]:
    """Yield a finding for each callback that takes a share of a batch.

    Args:
        timing: where the time went.
        of_library: phases of callbacks without which a library does not train: nothing that the user can leave out.
    """
    if not timing.step:
        return
    for row in timing.rows:
        if row.group != "batch" or not row.callback or row.phase in of_library:
            continue
        usual, mean = row.median or 0, row.total // max(timing.batches, 1)
        is_rare = timing.batches >= _ENOUGH and (row.p95 or 0) > mean > _RARE * usual  # at every n-th batch
        time = mean if is_rare else usual
        step = timing.step + time - usual
        if timing.busy is not None and not is_rare:  # no GPU is at work during events that most batches lack
            time = min(time, timing.gainable)
        share = time / step
        if share < _LITTLE or time < _NOTICED:
            continue
        name = row.callback
        some = " on average, though it works in some only" if is_rare else ""
        yield FitFinding(
            kind="callback",
            severity="advice" if share >= _SHARE else "note",
            what=f"the callback `{name}` takes {format_time(time)} of each batch{some}",
            evidence=f"{share:.0%} of a batch of {format_time(step)}, {format_time(row.total)} in all",
            change=f"do less in `{name}`, or do it {'more rarely' if is_rare else 'every n-th batch'}: `if "
            "self.train_iter % 50 == 0`",
            time=time,
        )


_WORK = {phases.FORWARD, phases.LOSS, phases.BACKWARD, phases.STEP}
_STEPS = 0
"""The number of the loop that has no loader: there a batch ends when an optimizer has stepped (of several that step for one
loss, the last) or, where none steps, at the next loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch: nanoseconds by phase."""

    loop: int  # number of the pass over a loader, from 1; 0 for a loop without a loader
    start: int  # nanoseconds, by the clock of the log
    times: dict[str, int]  # nanoseconds by phase
    is_complete: bool = True  # False: the loop was left, or an error ended it
    is_disturbed: bool = False  # nbguard looked closer: its times tell nothing of the fit
    has_loss: bool = False  # there was a loss to train on
    was_to_train: bool = False  # an error ended it, the first one of its pass, before there was a loss
    step: int = field(init=False)  # nanoseconds, without the time of nbguard itself

    def __post_init__(self) -> None:
        """Add the times up, once for all who ask."""
        object.__setattr__(self, "step", sum(self.times.values()) - self.times.get(phases.OWN, 0))

    @property
    def is_training(self) -> bool:
        """Say whether it trained anything, or was about to."""
        return self.has_loss or self.was_to_train or phases.BACKWARD in self.times or phases.STEP in self.times


@dataclass(frozen=True, slots=True)
class Moment:
    """The phase that went on at a moment, and the pass over a loader whose batch it belongs to."""

    phase: str  # in the words of `phases`
    loop: int | None = None  # number of the pass, as of a batch; None if around the batches
    batch: int = 0  # start of the batch, by the clock of the log; 0 if around the batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """All batches in the order of their beginning, and the nanoseconds by phase that belong to none."""

    batches: tuple[Batch, ...]  # in the order of their beginning
    outside: dict[str, int]  # nanoseconds by phase that belong to no batch
    start: int  # when the log began, by the clock of the marks
    wall: int  # nanoseconds: all of it
    fits: int = 0  # of Learners
    callbacks: Mapping[str, str] = field(default_factory=dict)  # class of the callback by its phase, as in the log
    moments: tuple[Moment, ...] = ()  # those that were asked for


@dataclass(slots=True, kw_only=True)
class _Open:
    """A batch that goes on. `later` is the time after a loop inside it: it counts only if its own loop goes on."""

    start: int  # nanoseconds, by the clock of the log
    times: dict[str, int] = field(default_factory=dict)  # nanoseconds by phase
    later: dict[str, int] = field(default_factory=dict)  # the same, after a loop inside it ended
    is_disturbed: bool = False  # nbguard looked closer in it
    has_loss: bool = False  # there was a loss in it
    was_to_train: bool = False  # an error ended it, the first one of its pass, before there was a loss
    was_left: bool = False  # a loop inside it has ended, and its own loop has not gone on yet
    loop: int | None = None  # number of its pass, once it is kept

    def add(self, phase: str, nanoseconds: int) -> None:
        times = self.later if self.was_left else self.times
        times[phase] = times.get(phase, 0) + nanoseconds

    def join(self, times: Mapping[str, int]) -> None:
        for phase, nanoseconds in times.items():
            self.add(phase, nanoseconds)

    def resume(self) -> None:
        self.was_left = False
        self.join(self.later)
        self.later.clear()


@dataclass(slots=True, kw_only=True)
class _Loop:
    """A pass over a loader that goes on."""

    number: int  # of the iterator
    key: int  # of the pass
    batch: _Open  # that goes on
    done: int = 0  # batches that are over
    is_ahead: bool = False  # it is asked one batch ahead, as some libraries do: the last comes after its end
    has_ended: bool = False  # its iterator had no batch left


def _only_evaluates(batch: _Open) -> bool:
    """Say whether a batch called a model and trained nothing."""
    return (
        phases.FORWARD in batch.times and not batch.has_loss and batch.times.keys().isdisjoint((phases.BACKWARD, phases.STEP))
    )


_MOST_TASKS = 100
"""Loops that take turns, each with a loss; of more the inner ones count as left."""


class _Divider:
    """Goes through the log once. The innermost loop that goes on owns the time; a loop inside a batch interrupts it."""

    def __init__(self, marks: PhaseLog, moments: Iterable[int] = ()) -> None:
        self.batches: list[Batch] = []
        self._moments = iter(moments)
        self._moment = next(self._moments, None)  # the next one that is asked for
        self._at: list[tuple[str, _Open | None]] = []  # of each moment its phase and batch
        self.outside: Counter[str] = Counter()
        self.fits = 0
        self._open: dict[int, _Loop] = {}  # by number, the innermost last
        self._beside: set[int] = set()  # iterators that are asked once for each batch of another: `zip(one, two)`
        self._idle: set[int] = set()  # passes whose time is around the batches
        self._loops = 0
        self._loose: _Open | None = None  # a batch of a loop without a loader, or the code around it
        self._stepped: _Open | None = None  # the one before, after a step
        self._steps = any(boundary.kind == "step" for boundary in marks.boundaries)
        self._asked = Counter(boundary.loop for boundary in marks.boundaries if boundary.kind == "batch")
        self._divide(marks)

    def _divide(self, marks: PhaseLog) -> None:
        at, before = 0, marks.start
        for boundary in marks.boundaries:
            if boundary.at > at:
                before = self._add_marks(marks, at, boundary.at, before)
                at = boundary.at
            self._boundary(boundary, before)
        self._add_marks(marks, at, len(marks.codes), before)
        while self._open:
            _, loop = self._open.popitem()
            self._close(loop, is_complete=loop.has_ended)
        self._keep_stepped()
        if self._loose is not None and self._loose.has_loss and not self._steps:
            self._keep(_STEPS, self._loose, is_complete=False)
        elif self._loose is not None:
            self.outside.update(self._loose.times)
        self._set_aside()
        self.batches.sort(key=lambda batch: batch.start)

    def _set_aside(self) -> None:
        """Count passes for which no model was called around the batches, if the model of those that train is seen in its calls.

        A loop over a loader computes the mean of its data, say, or makes a list of them.
        """
        if self.fits:  # the calls that a Learner's callbacks make of it have no marks
            return
        if not any(batch.is_training and phases.FORWARD in batch.times for batch in self.batches):
            return
        working = {batch.loop for batch in self.batches if batch.is_training or not _WORK.isdisjoint(batch.times)}
        for batch in self.batches:
            if batch.loop not in working:
                self.outside.update(batch.times)
                self._idle.add(batch.loop)
        self.batches = [batch for batch in self.batches if batch.loop in working]

    def _add_marks(self, marks: PhaseLog, first: int, last: int, before: int) -> int:
        """Add the marks between two boundaries, which begin at `before`; return when the last one was set."""
        labels, moment = marks.labels, self._moment
        innermost = self._innermost if self._open else None
        for code, time in zip(marks.codes[first:last], marks.times[first:last], strict=True):
            phase = labels[code]
            if innermost is not None:
                innermost.batch.add(phase, time - before)
            elif phase == phases.WORKERS or (self._loose is None and phase not in phases.STEP_PHASES):
                self.outside[phase] += time - before
            else:
                self._loose = self._loose or _Open(start=before)
                self._loose.add(phase, time - before)
            while moment is not None and moment < time:
                self._at.append((phase, innermost.batch if innermost is not None else self._loose))
                moment = self._moment = next(self._moments, None)
            before = time
        return before

    def _boundary(self, boundary: Boundary, time: int) -> None:
        if boundary.kind == "batch":
            self._next(boundary.loop, time)
        elif boundary.kind == "end":
            self._end(boundary.loop)
        elif boundary.kind == "fit":
            self.fits += 1
        elif boundary.kind == "cut":
            if self._open:
                self._innermost.batch.was_to_train = not self._innermost.done
        elif boundary.kind in ("disturbed", "loss"):
            if (
                boundary.kind == "loss"
                and not self._steps
                and not self._open
                and self._loose is not None
                and self._loose.has_loss
            ):
                self._keep(_STEPS, self._loose, is_complete=True)
                self._loose = _Open(start=time)
            batch = self._innermost.batch if self._open else self._loose
            if batch is not None:
                batch.is_disturbed |= boundary.kind == "disturbed"
                batch.has_loss |= boundary.kind == "loss"
        elif self._open and self._innermost.has_ended:
            self._close(self._open.popitem()[1], is_complete=True)
        elif not self._open and self._loose is not None:
            self._end_stepped(self._loose)
            self._loose = _Open(start=time)

    def _end_stepped(self, batch: _Open) -> None:
        """End a batch of a loop without a loader at a step. Without a loss of its own it is a part of the one before."""
        before = self._stepped
        if before is None or batch.has_loss or not before.has_loss:
            self._keep_stepped()
            self._stepped = batch
            return
        before.join(batch.times)
        before.is_disturbed |= batch.is_disturbed
        batch.loop, batch.start = _STEPS, before.start

    def _keep_stepped(self) -> None:
        if self._stepped is not None:
            self._keep(_STEPS, self._stepped, is_complete=True)
            self._stepped = None

    def _next(self, number: int, time: int) -> None:
        if number in self._beside:
            return
        while self._open and self._innermost.has_ended:
            self._close(self._open.popitem()[1], is_complete=True)
        if number in self._open:
            self._return_to(number)
            self._turn_over(self._innermost, time)
            return
        self._keep_stepped()
        if self._loose is not None:
            self.outside.update(self._loose.times)
            self._loose = None
        if self._open:
            self._innermost.batch.was_left = False
        self._loops += 1
        self._open[number] = _Loop(number=number, key=self._loops, batch=_Open(start=time))

    @property
    def _innermost(self) -> _Loop:
        return next(reversed(self._open.values()))

    def _return_to(self, number: int) -> None:
        """Make a loop the innermost one: those inside it were left, or take turns with it and go on later."""
        inside = list(takewhile(lambda other: other.number != number, reversed(self._open.values())))
        takes_turns = len(inside) < _MOST_TASKS and self._open[number].batch.has_loss
        if takes_turns and all(other.batch.has_loss for other in inside):  # each trains: tasks that take turns
            for other in inside:
                other.batch.was_left = True
            self._open[number] = self._open.pop(number)
            return
        for other in inside:
            del self._open[other.number]
        for other in inside:
            self._leave(other)

    def _turn_over(self, loop: _Loop, time: int) -> None:
        """Begin the next batch of a loop."""
        loop.batch.resume()
        loop.done += 1
        if loop.done == 1 and _WORK.isdisjoint(loop.batch.times):
            loop.is_ahead = True  # nothing was done with the first batch before the second was asked for
            return
        self._keep(loop.key, loop.batch, is_complete=True)
        loop.batch = _Open(start=time)

    def _leave(self, loop: _Loop) -> None:
        """A loop around this one goes on: this one was left by a `break`, or is asked once for each batch of the other."""
        around = self._innermost.batch
        if loop.done or (self._asked[loop.number] == 1 and _only_evaluates(loop.batch) and not _WORK.isdisjoint(around.times)):
            self._close(loop, is_complete=False)
            return
        self._beside.add(loop.number)
        around.was_left = False
        around.join(loop.batch.times)
        around.join(loop.batch.later)
        around.is_disturbed |= loop.batch.is_disturbed
        around.has_loss |= loop.batch.has_loss

    def _end(self, number: int) -> None:
        """An iterator had no batch left: the time it took to say so belongs to no batch."""
        if number in self._beside or number not in self._open:
            self._beside.discard(number)
            return
        while self._innermost.number != number:
            self._close(self._open.popitem()[1], is_complete=False)
        loop = self._innermost
        if loop.is_ahead:
            loop.has_ended = True  # the last batch is still to be worked on
            return
        self.outside.update(self._open.popitem()[1].batch.times)
        if self._open:
            self._innermost.batch.was_left = True

    def _close(self, loop: _Loop, *, is_complete: bool) -> None:
        """Keep the batch that goes on. The only one of a pass, left before anything was done with it, tells of no pass."""
        self.outside.update(loop.batch.later)
        if not (is_complete or loop.done or loop.batch.has_loss) and _WORK.isdisjoint(loop.batch.times):
            self.outside.update(loop.batch.times)
            return
        self._keep(loop.key, loop.batch, is_complete=is_complete)

    @property
    def moments(self) -> Iterator[Moment]:
        """Yield the moments that were asked for, up to the end of the log."""
        for phase, batch in self._at:
            is_kept = batch is not None and batch.loop is not None and batch.loop not in self._idle
            yield Moment(phase, batch.loop, batch.start) if batch is not None and is_kept else Moment(phase)

    def _keep(self, loop: int, batch: _Open, *, is_complete: bool) -> None:
        batch.loop = loop
        self.batches.append(
            Batch(
                loop=loop,
                start=batch.start,
                times=batch.times,
                is_complete=is_complete,
                is_disturbed=batch.is_disturbed,
                has_loss=batch.has_loss,
                was_to_train=batch.was_to_train,
            )
        )


def divide(marks: PhaseLog, moments: Iterable[int] = ()) -> Batches:
    """Return the batches of a log. Their times and those outside add up to its wall time.

    `moments`: times of the log's clock, in order, whose phase and batch are asked for.
    """
    divider = _Divider(marks, moments)
    return Batches(
        batches=tuple(divider.batches),
        outside=dict(divider.outside),
        start=marks.start,
        wall=marks.wall,
        fits=divider.fits,
        callbacks=marks.callbacks,
        moments=tuple(divider.moments),
    )


def passes(batches: Batches) -> Iterator[tuple[int, list[Batch]]]:
    """Yield each pass over a loader, by its number, with its batches; loops without a loader are one pass."""
    by_loop: dict[int, list[Batch]] = {}
    for batch in batches.batches:
        by_loop.setdefault(batch.loop, []).append(batch)
    yield from by_loop.items()


# --- The time of a fit, with totals that add up to its wall time, and the phases of a batch in the steady state


_WARM_UP = 3
"""Batches before the steady state: libraries choose algorithms, allocators ask for memory, workers start."""
_ENOUGH_STEPS = 6
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
    if third < _ENOUGH_STEPS // 3:
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
