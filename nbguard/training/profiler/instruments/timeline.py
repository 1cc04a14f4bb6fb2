"""The memory of a fit on one device over time, read at the recorder's events, as levels for a picture and by phase."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from nbguard.memory.core.facts import Unavailable
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.training.profiler.analysis.memory_growth import Level, MemoryObservations, Stage, Unfrozen
from nbguard.training.profiler.analysis.recorded_batch import Shape, Stock
from nbguard.training.profiler.analysis.report import MemoryPoint, PhasePeak
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.checks.optimizer_facts import groups_of
from nbguard.training.profiler.instruments.growth_watch import GrowthWatch
from nbguard.training.profiler.instruments.memory_counters import (
    DeepWatch,
    HeapCounter,
    MemoryCounter,
    OlderStorages,
    Stocktaker,
    device_of,
    heap,
    open_gpus,
)
from nbguard.training.profiler.record.recorder import Event, Recorder

# --- Levels of memory over a fit, as points for a picture, and the highest level of each phase.


MOST_POINTS = 2000
_FIRST = 24, 4
"""Batches whose boundaries and insides are always sampled, whatever the cost."""
_SLOW = 1_000_000
"""Nanoseconds of a reading that must be afforded inside of the first batches, too: malloc's counter goes through
all that is free, 13 ms with some 250,000 tensors alive."""
_SHARE = 0.001
"""Share of the time that has passed that reading the counters at boundaries may take; and once more inside batches."""
_HEAD_START = 5_000_000, 1_500_000
"""Nanoseconds that each of both may take beyond that: a short fit would be seen too seldom to say anything of it."""
_READS = 10
"""Readings in a batch whose phases are followed, about."""


class Pace:
    """Says when a reading can be afforded, going by the processor time that readings have taken so far."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._began = clock()
        self._spent = [0, 0]  # nanoseconds: at boundaries, inside batches
        self._readings = 0
        self._cost = 0.0  # nanoseconds of a reading
        self._next = [0.0, 0.0]  # from when on a reading can be afforded, by the clock

    @staticmethod
    def begin() -> int:
        """Return the time at which a reading begins, for `note`."""
        return time.thread_time_ns()

    def note(self, begun: int, *, inside: bool) -> None:
        """Note that a reading ended: `inside` a batch, or at the boundary of one."""
        self._spent[inside] += time.thread_time_ns() - begun
        self._readings += 1
        self._cost = sum(self._spent) / self._readings
        for place, (spent, readings) in enumerate(zip(self._spent, (1, _READS), strict=True)):
            self._next[place] = self._began + (spent + self._cost * readings - _HEAD_START[place]) / _SHARE

    def allows(self, batch: int, *, inside: bool) -> bool:
        """Say whether the boundary before a batch may be read, or the inside of that batch, too."""
        is_first = batch <= _FIRST[inside] and not (inside and self._cost > _SLOW)
        return is_first or self._clock() >= self._next[inside]


class LevelHistory:
    """Points, thinned out by half whenever they are too many, and peaks by phase."""

    def __init__(self, start: Level) -> None:
        self.highest: int = start.allocated  # bytes: seen, or of the peak counter
        self.highest_phase: str = ""
        self.last: Level = start
        self._group: list[MemoryPoint] = []
        self._groups = [self._group]  # one for each batch that is kept
        self._points = 0
        self._every = 1
        self._seen = 1
        self._peaks: dict[str, int] = {}

    def begin_batch(self) -> None:
        """Let the points that follow belong together: they are kept or dropped together."""
        self._group = []
        if self._seen % self._every == 0:
            self._groups.append(self._group)
        self._seen += 1

    def add(self, at: int, phase: str, batch: int, level: Level, *, follows: bool) -> int:
        """Note the counters at the end of a phase; return the highest level that is known of it, in bytes.

        Args:
            at: nanoseconds since the recording began.
            phase: that has just ended.
            batch: number of the batch.
            level: the counters now.
            follows: the reading before was at the beginning of this phase.
        """
        self._group.append(MemoryPoint(at=at, phase=phase, batch=batch, allocated=level.allocated, reserved=level.reserved))
        self._points += self._group is self._groups[-1]
        counted = level.peak if level.peak is not None and self.last.peak is not None and level.peak > self.last.peak else 0
        read = max(level.allocated, self.last.allocated) if follows else level.allocated
        highest = max(counted, read)
        if follows:
            self._peaks[phase] = max(self._peaks.get(phase, 0), highest)
        if highest > self.highest:
            self.highest, self.highest_phase = highest, phase if follows else ""
        self.last = level
        self._thin()
        return highest

    def _thin(self) -> None:
        if self._points > MOST_POINTS and len(self._groups) > 1:
            self._groups = self._groups[::2]
            self._every *= 2
            self._points = sum(map(len, self._groups))

    @property
    def points(self) -> tuple[MemoryPoint, ...]:
        """Return the points that are kept, oldest first."""
        return tuple(point for group in self._groups for point in group)

    @property
    def phases(self) -> tuple[PhasePeak, ...]:
        """Return the highest level of each phase that was followed."""
        return tuple(PhasePeak(phase, most) for phase, most in self._peaks.items())


_LOSSES = 64
"""Losses that are remembered, weakly, to see after the fit how many of them live on."""
_MOST_OPTIMIZERS = 8
"""Optimizers at whose first steps stock is taken."""
_ALONE = 4
"""Optimizer steps since the last batch of a loader until the loop is taken to have none, so that steps divide batches."""


class MemoryTimeline:
    """Reads the counters at boundaries of batches and, in some, after their phases; takes stock once per epoch."""

    watches = "figures of memory"

    def __init__(self, recorder: Recorder, counter: MemoryCounter, start: Level, older: OlderStorages, *, deep: bool) -> None:
        """`start`: the counters when the profile began; `older`: the storages that lived then."""
        self._recorder = recorder
        self._counter = counter
        self._start = start
        self._pace = Pace(recorder.clock)
        self._levels = LevelHistory(start)
        self._growth = GrowthWatch(recorder, lambda: counter.read().allocated, counter.tensors_on.partition(":")[0])
        self._stocktaker = Stocktaker(counter.tensors_on, counter.rounding, older)
        self._recorded = DeepWatch(recorder, counter, start.allocated) if deep else None
        self._stock: Stock | None = None
        self._trained_parameters: frozenset[int] = frozenset()  # ids, of the optimizer at the latest stock
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._highest = start.allocated  # up to the batch that goes on
        self._unfrozen: list[tuple[int, int, Stock, int]] = []
        """Each time: so many more parameters, the peak and the stock before, the number of the training batch."""
        self._is_due = True  # that stock is taken
        self._learner: weakref.ref[Any] | None = None
        self._boundaries = self._steps = self._alone = 0
        self._trained = self._epoch_trained = False
        self._training = 0  # training batches
        self._epoch = 1
        self._is_followed = False  # this batch, phase by phase
        self._hears = (False, False)  # of phases, of calls
        self._shape: Shape | None = None
        self._losses: list[weakref.ref[Any]] = []
        self._before: int | None = None
        self._after_loss: int | None = None
        self._high, self._high_phase = 0, ""

    def subscribe(self) -> None:
        """Subscribe to the events of the fit from now on."""
        subscribe = self._recorder.subscribe
        subscribe("batch", self._batch)
        subscribe("end", self._pass_ends)
        subscribe("loss", self._loss)
        subscribe("step", self.step)
        subscribe("learner", self.learner)
        subscribe("fit ends", self._growth.end)
        self._listen()

    def _listen(self) -> None:
        """Subscribe to phases and to calls only while they are needed."""
        wants = self._is_followed, self._is_followed or self._is_due
        if wants == self._hears:
            return
        self._hears = wants
        acts: tuple[tuple[Event, Callable[..., None]], ...] = (("phase", self._phase), ("forward", self._forward))
        for is_wanted, (event, act) in zip(wants, acts, strict=True):
            (self._recorder.subscribe if is_wanted else self._recorder.unsubscribe)(event, act)

    # --- events -----------------------------------------------------------------------------------------------------------

    def learner(self, learner: Any) -> None:
        """Note the Learner whose fit begins: its batch has targets, too."""
        self._learner = weakref.ref(learner)

    def _batch(self, _: int) -> None:
        self._alone = 0
        self._boundary()
        self._listen()

    def _pass_ends(self) -> None:
        self._is_due = True
        self._epoch += self._epoch_trained
        self._epoch_trained = False
        self._listen()

    def _forward(self, module: Any, inputs: Any) -> None:
        if self._is_due and self._steps:
            learner = None if self._learner is None else self._learner()
            targets = None if learner is None else attribute_of(learner, "yb")
            self._stocktaker.call(module, inputs, targets)
        if self._is_followed:
            level = self._read_inside(phase_log.OTHER)
            self._before = level.allocated if self._before is None else self._before

    def _phase(self, code: int) -> None:
        if self._is_followed:
            phase = self._recorder.phase(code)
            level = self._read_inside(phase)
            if phase == phase_log.LOSS:
                self._after_loss = level.allocated

    def _loss(self, loss: Any) -> None:
        self._trained = True
        if self._recorded is not None:
            self._recorded.saves(loss)
        if len(self._losses) < _LOSSES:
            learner = None if self._learner is None else self._learner()
            # The loss that callbacks get from a Learner is a copy of the one that is trained on.
            kept = loss if learner is None else attribute_of(learner, "loss")
            if issubclass(type(kept), sys.modules["torch"].Tensor):
                self._losses.append(weakref.ref(kept))
        if self._is_followed and self._after_loss is None:
            self._after_loss = self._read_inside(phase_log.LOSS).allocated

    def step(self, optimizer: Any) -> None:
        """Note that an optimizer is about to step: gradients are there and, from the second step on, its state."""
        self._trained = True
        self._steps += 1
        if optimizer not in self._optimizers and len(self._optimizers) < _MOST_OPTIMIZERS:
            self._optimizers.add(optimizer)
            self._is_due = True
        if self._is_due and self._steps > 1:
            before, (self._stock, addresses) = self._stock, self._stocktaker.take(optimizer)
            self._is_due = self._trains_more(optimizer, before)  # then the state comes with this step
            if self._recorded is not None and self._recorded.is_recording:
                self._recorded.name(self._stock, addresses)
        self._alone += 1
        if not self._recorder.batches or self._alone > _ALONE:
            self._boundary()
        elif self._is_followed:
            self._read_inside(phase_log.OTHER)
        self._listen()

    def _trains_more(self, optimizer: Any, before: Stock | None) -> bool:
        """Say whether an optimizer also trains parameters that it, or the one before, did not train at the stock `before`."""
        ids = frozenset(id(p) for group in groups_of(optimizer) for p in group.parameters if p.requires_grad)
        trained, self._trained_parameters = self._trained_parameters, ids
        if before is None or not trained < ids or not trained:
            return False
        self._unfrozen.append((len(ids) - len(trained), self._highest, before, self._recorder.trained))
        return True

    def _boundary(self) -> None:
        self._highest = self._levels.highest
        self._boundaries += 1
        is_training, self._trained = self._trained, False
        self._training = max(self._training + is_training, self._recorder.trained)
        self._epoch_trained |= is_training
        is_recorded = self._recorded is not None and self._recorded.is_recording
        if is_recorded or self._pace.allows(self._boundaries, inside=False):
            self._read_boundary(is_training)
        else:
            self._close()
            self._is_followed = False

    def _read_boundary(self, is_training: bool) -> None:
        begun = self._pace.begin()
        self._levels.begin_batch()
        level = self._read(phase_log.OTHER)
        self._close()
        self._pace.note(begun, inside=False)
        self._is_followed = self._pace.allows(self._boundaries, inside=True)
        if is_training:
            of_log = self._recorder.nbytes if type(self._counter) is HeapCounter else 0
            self._growth.sample(self._training, self._epoch, level.allocated - of_log)
        if self._recorded is not None:
            self._recorded.boundary(self._training, is_training, level)
            if self._recorded.is_recording:
                self._is_followed = self._is_due = True

    # --- readings --------------------------------------------------------------------------------------------------------

    def _read(self, phase: str) -> Level:
        level = self._counter.read()
        high = self._levels.add(self._recorder.elapsed, phase, self._boundaries, level, follows=self._is_followed)
        if high > self._high:
            self._high, self._high_phase = high, phase
        return level

    def _read_inside(self, phase: str) -> Level:
        """Read at the end of a phase of a batch that is followed."""
        begun = self._pace.begin()
        level = self._read(phase)
        if self._recorded is not None and self._recorded.is_recording:
            self._recorded.mark(phase, level)
        self._pace.note(begun, inside=True)
        return level

    def _close(self) -> None:
        """End a batch. Of those that were followed, the one with the highest peak stands for all."""
        if self._is_followed and self._before is not None and (self._shape is None or self._high >= self._shape.peak):
            self._shape = Shape(self._before, self._after_loss, self._high, self._high_phase)
        self._before = self._after_loss = None
        self._high = 0

    def _more_trained(self) -> Unfrozen | None:
        if not self._unfrozen or self._stock is None:
            return None
        more, peak, before, _ = self._unfrozen[-1]
        kept = self._stock.gradients + self._stock.state - before.gradients - before.state
        stocks = [*(stock for _, _, stock, _ in self._unfrozen), self._stock]
        begins = [1, *(batch for *_, batch in self._unfrozen)]
        stages = (
            Stage(begins=batch, state=stock.state, gradients=stock.gradients)
            for batch, stock in zip(begins, stocks, strict=True)
        )
        return Unfrozen(parameters=more, peak=peak, kept=max(kept, 0), stages=tuple(stages))

    def stop(self) -> None:
        """Take down the recording, which changes how operations run."""
        if self._recorded is not None:
            self._recorded.stop()

    def observe(self) -> MemoryObservations:
        """Read the counters a last time and return all that was read."""
        self._close()
        self._growth.end()
        end, levels, recorded = self._counter.read(), self._levels, self._recorded
        samples, grown = self._growth.observe()
        return MemoryObservations(
            device=self._counter.device,
            source=self._counter.source,
            capacity=self._counter.capacity,
            start=self._start,
            end=end,
            highest=levels.highest,
            highest_phase=levels.highest_phase,
            phases=levels.phases,
            points=levels.points,
            stock=self._stock,
            shape=self._shape,
            unfrozen=self._more_trained(),
            samples=samples,
            living_losses=sum(loss() is not None for loss in self._losses),
            grown=grown,
            recorded=None if recorded is None else recorded.result,
            recording_note="" if recorded is None else recorded.note,
        )


# --- Memory as a part of a profile, which chooses a counter, and leaves the rest to the timeline of its device.


_NOTHING = Unavailable("memory", "no module was called and no optimizer has stepped: there was no fit to follow")


class MemoryWatch:
    """Follows the memory of the device on which the fit's first module is.

    Args:
        deep: record two batches allocation by allocation.
        counter: of memory, if not torch's or malloc's: `SimulatedCounter(sim)` while `nbguard.simulate` runs.
    """

    watches = "figures of memory"

    def __init__(self, deep: bool = False, counter: MemoryCounter | None = None) -> None:
        self._deep = deep
        self._given = counter
        self._starts: list[tuple[MemoryCounter, Level]] = []
        self._recorder: Recorder | None = None
        self._older: OlderStorages | None = None
        self._timeline: MemoryTimeline | None = None
        self._last_learner: weakref.ref[Any] | None = None
        self._result: MemoryObservations | Unavailable = _NOTHING

    def start(self, recorder: Recorder) -> None:
        """Read the counters, and wait for the first module."""
        counters = [*open_gpus(), *heap()] if self._given is None else [self._given]
        self._older = OlderStorages()
        self._starts = [(counter, counter.read()) for counter in counters]
        self._recorder = recorder
        recorder.subscribe("learner", self._learner)
        recorder.subscribe("model", self._model)
        recorder.subscribe("step", self._step)

    def stop(self) -> None:
        """Read the counters at the end, and hold nothing any more."""
        timeline, self._timeline, self._recorder, self._older = self._timeline, None, None, None
        if timeline is None:
            return
        try:
            timeline.stop()
            self._result = timeline.observe()
        except RuntimeError as error:  # after a device-side assert CUDA answers nothing
            self._result = Unavailable("memory", f"the counters could not be read at the end ({error})".partition("\n")[0])

    def observe(self) -> MemoryObservations | Unavailable:
        """Return the counters and samples that were read, after `stop`; or the reason why there are none."""
        return self._result

    def _learner(self, learner: Any) -> None:
        if self._timeline is None:
            self._last_learner = weakref.ref(learner)

    def _model(self, module: Any, inputs: Any) -> None:
        self._begin(device_of(module, inputs))  # which receives this call, too

    def _step(self, optimizer: Any) -> None:
        timeline = self._begin("")
        if timeline is not None:
            timeline.step(optimizer)

    def _begin(self, device: str) -> MemoryTimeline | None:
        """Choose the counter of `device` ("" if unknown), and follow it."""
        recorder, self._recorder, older, self._older = self._recorder, None, self._older, None
        if recorder is None or older is None:
            return None
        recorder.unsubscribe("model", self._model)
        recorder.unsubscribe("step", self._step)
        chosen = self._choose(device)
        if isinstance(chosen, Unavailable):
            self._result = chosen
            return None
        self._timeline = timeline = MemoryTimeline(recorder, *chosen, older, deep=self._deep)
        if self._last_learner is not None and (learner := self._last_learner()) is not None:
            timeline.learner(learner)
        timeline.subscribe()
        return timeline

    def _choose(self, device: str) -> tuple[MemoryCounter, Level] | Unavailable:
        kind = device.partition(":")[0]
        if self._given is not None or not device:
            chosen = self._starts[:1]
        else:
            chosen = [candidate for candidate in self._starts if candidate[0].tensors_on == device]
        if not chosen and (kind == "cuda" or not device):  # CUDA has come into use since the start
            chosen = [(counter, Level(0, 0, 0, 0)) for counter in open_gpus() if device in ("", counter.device)][:1]
        if chosen:
            return chosen[0]
        if kind in ("", "cpu"):
            return Unavailable("memory", "this system's malloc does not tell how much is in use: CPU memory is not followed")
        return Unavailable("memory", f"nbguard knows no counter of memory on {kind}")
