"""The course of a fit's memory on one device, told by the recorder's events."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from nbguard.profiler.analysis.memory.categories import Shape, Stock, categories
from nbguard.profiler.analysis.memory.recorded_batch import with_batch
from nbguard.profiler.analysis.report import MemoryReport
from nbguard.profiler.analysis.time import phases
from nbguard.profiler.instruments.memory.categories import Stocktaker
from nbguard.profiler.instruments.memory.counters import Level, MemoryCounter
from nbguard.profiler.instruments.memory.growth import GrowthWatch
from nbguard.profiler.instruments.memory.levels import LevelHistory, Pace
from nbguard.profiler.instruments.memory.two_batches import DeepWatch
from nbguard.profiler.record.recorder import Event, Recorder
from nbguard.scan.heap.attributes import attribute_of
from nbguard.units import format_bytes

_ALONE = 4
"""Optimizer steps since the last batch of a loader after which the loop is taken to have none: then steps divide batches."""
_NEAR = 0.98
"""Share of the peak that must have been seen in a phase to say that the peak fell there."""


class MemoryTimeline:
    """Reads the counters at boundaries of batches and, in some, after their phases; takes stock once per epoch."""

    def __init__(self, recorder: Recorder, counter: MemoryCounter, start: Level, *, deep: bool) -> None:
        self._recorder = recorder
        self._counter = counter
        self._start = start
        self._pace = Pace(recorder.clock)
        self._history = LevelHistory(start)
        self._growth = GrowthWatch(recorder, lambda: counter.read().allocated)
        self._stocktaker = Stocktaker(counter.tensors_on, counter.rounding)
        self._deep = DeepWatch(recorder, counter, start.allocated) if deep else None
        self._stock: Stock | None = None
        self._is_due = True  # that stock is taken
        self._learner: weakref.ref[Any] | None = None
        self._boundaries = self._steps = self._alone = 0
        self._trained = self._epoch_trained = False
        self._training = 0  # training batches
        self._epoch = 1
        self._is_followed = False  # this batch, phase by phase
        self._hears = (False, False)  # of phases, of calls
        self._shape: Shape | None = None
        self._before: int | None = None
        self._after_loss: int | None = None
        self._high, self._high_phase = 0, ""

    def subscribe(self) -> None:
        """Be told of what happens from now on."""
        subscribe = self._recorder.subscribe
        subscribe("batch", self._batch)
        subscribe("end", self._pass_ends)
        subscribe("loss", self._loss)
        subscribe("step", self.step)
        subscribe("learner", self.learner)
        subscribe("fit ends", self._growth.end)
        self._listen()

    def _listen(self) -> None:
        """Be told of phases and of calls only where something is made of them."""
        wants = self._is_followed, self._is_followed or self._is_due
        if wants == self._hears:
            return
        self._hears = wants
        acts: tuple[tuple[Event, Callable[..., None]], ...] = (("phase", self._phase), ("forward", self._forward))
        for is_wanted, (event, act) in zip(wants, acts, strict=True):
            (self._recorder.subscribe if is_wanted else self._recorder.unsubscribe)(event, act)

    # --- events -----------------------------------------------------------------------------------------------------------

    def learner(self, learner: Any) -> None:
        """Note whose fit begins: its batch has targets, too."""
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
            level = self._read_inside(phases.OTHER)
            self._before = level.allocated if self._before is None else self._before

    def _phase(self, code: int) -> None:
        if self._is_followed:
            phase = self._recorder.phase(code)
            level = self._read_inside(phase)
            if phase == phases.LOSS:
                self._after_loss = level.allocated

    def _loss(self, _: Any) -> None:
        self._trained = True
        if self._is_followed and self._after_loss is None:
            self._after_loss = self._read_inside(phases.LOSS).allocated

    def step(self, optimizer: Any) -> None:
        """Note that an optimizer is about to step: gradients are there and, from the second step on, its state."""
        self._trained = True
        self._steps += 1
        if self._is_due and self._steps > 1:
            self._stock, addresses = self._stocktaker.take(optimizer)
            self._is_due = False
            if self._deep is not None and self._deep.is_recording:
                self._deep.name(self._stock, addresses)
        self._alone += 1
        if not self._recorder.batches or self._alone > _ALONE:
            self._boundary()
        elif self._is_followed:
            self._read_inside(phases.OTHER)
        self._listen()

    def _boundary(self) -> None:
        self._boundaries += 1
        is_training, self._trained = self._trained, False
        self._training = max(self._training + is_training, self._recorder.trained)
        self._epoch_trained |= is_training
        is_recorded = self._deep is not None and self._deep.is_recording
        if is_recorded or self._pace.allows(self._boundaries, inside=False):
            self._read_boundary(is_training)
        else:
            self._close()
            self._is_followed = False

    def _read_boundary(self, is_training: bool) -> None:
        begun = self._pace.begin()
        self._history.begin_batch()
        level = self._read(phases.OTHER)
        self._close()
        self._pace.note(begun, inside=False)
        self._is_followed = self._pace.allows(self._boundaries, inside=True)
        if is_training:
            self._growth.sample(self._training, self._epoch, level.allocated)
        if self._deep is not None:
            self._deep.boundary(self._training, is_training, level)
            if self._deep.is_recording:
                self._is_followed = self._is_due = True

    # --- what becomes of it -----------------------------------------------------------------------------------------------

    def _read(self, phase: str) -> Level:
        level = self._counter.read()
        high = self._history.add(self._recorder.elapsed, phase, self._boundaries, level, follows=self._is_followed)
        if high > self._high:
            self._high, self._high_phase = high, phase
        return level

    def _read_inside(self, phase: str) -> Level:
        """Read at the end of a phase of a batch that is followed."""
        begun = self._pace.begin()
        level = self._read(phase)
        if self._deep is not None and self._deep.is_recording:
            self._deep.mark(phase, level)
        self._pace.note(begun, inside=True)
        return level

    def _close(self) -> None:
        """End a batch. Of those that were followed, the one with the highest peak tells what memory consisted of then."""
        if self._is_followed and self._before is not None and (self._shape is None or self._high >= self._shape.peak):
            self._shape = Shape(self._before, self._after_loss, self._high, self._high_phase)
        self._before = self._after_loss = None
        self._high = 0

    def stop(self) -> None:
        """Take down what changes how operations run."""
        if self._deep is not None:
            self._deep.stop()

    def report(self) -> MemoryReport:
        """Read the counters a last time and return what the fit took."""
        self._close()
        self._growth.end()
        end, start, history = self._counter.read(), self._start, self._history
        is_counted = end.peak is not None and start.peak is not None and end.peak > start.peak
        peak = end.peak if is_counted and end.peak is not None else max(history.highest, end.allocated)
        reserved = [point.reserved for point in history.points if point.reserved is not None]
        is_told = end.peak_reserved is not None and start.peak_reserved is not None and end.peak_reserved > start.peak_reserved
        growth = self._growth.report()
        report = MemoryReport(
            device=self._counter.device,
            source=self._counter.source,
            peak=peak,
            start=start.allocated,
            end=end.allocated,
            capacity=self._counter.capacity,
            peak_reserved=end.peak_reserved if is_told else max(reserved, default=None),
            peak_phase=history.highest_phase if history.highest >= _NEAR * peak else "",
            phases=history.peaks(peak, is_counted=is_counted),
            categories=categories(peak, start.allocated, self._stock, self._shape, grows=growth is not None),
            points=history.points,
            growth=growth,
            notes=tuple(self._notes(start, is_counted)),
        )
        deep = self._deep
        return report if deep is None or deep.result is None else with_batch(report, deep.result)

    def _notes(self, start: Level, is_counted: bool) -> list[str]:
        notes = [self._deep.note] if self._deep is not None and self._deep.note else []
        if start.peak is None:
            where = (
                "outside the recorded batch" if self._deep is not None and self._deep.result is not None else "in all batches"
            )
            notes.append(f"malloc keeps no peak: {where} this is the highest level that was seen at the ends of phases")
        elif not is_counted:
            notes.append(
                f"{format_bytes(start.peak)} had been allocated at once before the fit, so its own peak is not counted: "
                "this is the highest level that was seen (torch.cuda.reset_peak_memory_stats() in the cell before tells more)"
            )
        if self._stock is None:
            notes.append("no optimizer has stepped twice: what the memory consists of was not looked at")
        return notes
