"""Memory as a part of a profile: chooses who counts, and hands the rest to the course of that device."""

from __future__ import annotations

import weakref
from typing import Any

from nbguard.memory.facts import Unavailable
from nbguard.profiler.analysis.report import MemoryReport
from nbguard.profiler.instruments.memory.categories import device_of
from nbguard.profiler.instruments.memory.counters import Level, Meter, heap, open_gpus
from nbguard.profiler.instruments.memory.timeline import Course
from nbguard.profiler.record.recorder import Recorder

_NOTHING = Unavailable("memory", "no module was called and no optimizer has stepped: there was no fit to follow")


class MemoryWatch:
    """Follows the memory of the device on which the fit's first module is.

    Args:
        deep: record two batches allocation by allocation.
        meter: who counts, if not torch or malloc: `SimulatedMeter(sim)` while `nbguard.simulate` runs.
    """

    def __init__(self, deep: bool = False, meter: Meter | None = None) -> None:
        self._deep = deep
        self._given = meter
        self._starts: list[tuple[Meter, Level]] = []
        self._recorder: Recorder | None = None
        self._course: Course | None = None
        self._last_learner: weakref.ref[Any] | None = None
        self._result: MemoryReport | Unavailable = _NOTHING

    def start(self, recorder: Recorder) -> None:
        """Read what there is, and wait for the first module."""
        meters = [*open_gpus(), *heap()] if self._given is None else [self._given]
        self._starts = [(meter, meter.read()) for meter in meters]
        self._recorder = recorder
        recorder.watch("learner", self._learner)
        recorder.watch("model", self._model)
        recorder.watch("step", self._step)

    def stop(self) -> None:
        """Read what there is at the end, and hold nothing any more."""
        course, self._course, self._recorder = self._course, None, None
        if course is None:
            return
        try:
            course.stop()
            self._result = course.report()
        except RuntimeError as error:  # after a device-side assert CUDA answers nothing
            self._result = Unavailable("memory", f"the counters could not be read at the end ({error})".partition("\n")[0])

    def report(self) -> MemoryReport | Unavailable:
        """Return what the fit took of memory, after `stop`."""
        return self._result

    def _learner(self, learner: Any) -> None:
        if self._course is None:
            self._last_learner = weakref.ref(learner)

    def _model(self, module: Any, inputs: Any) -> None:
        self._begin(device_of(module, inputs))  # which is told of this call, too

    def _step(self, optimizer: Any) -> None:
        course = self._begin("")
        if course is not None:
            course.step(optimizer)

    def _begin(self, device: str) -> Course | None:
        """Choose who counts on `device` (empty: not known), and follow it."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return None
        recorder.unwatch("model", self._model)
        recorder.unwatch("step", self._step)
        found = self._choose(device)
        if isinstance(found, Unavailable):
            self._result = found
            return None
        self._course = course = Course(recorder, *found, deep=self._deep)
        if self._last_learner is not None and (learner := self._last_learner()) is not None:
            course.learner(learner)
        course.watch()
        return course

    def _choose(self, device: str) -> tuple[Meter, Level] | Unavailable:
        kind = device.partition(":")[0]
        if self._given is not None or not device:
            found = self._starts[:1]
        else:
            found = [each for each in self._starts if each[0].tensors_on == device]
        if not found and (kind == "cuda" or not device):  # CUDA has come into use since the start
            found = [(meter, Level(0, 0, 0, 0)) for meter in open_gpus() if device in ("", meter.device)][:1]
        if found:
            return found[0]
        if kind in ("", "cpu"):
            return Unavailable("memory", "this system's malloc does not tell how much is in use: CPU memory is not followed")
        return Unavailable("memory", f"nobody counts what is allocated on {kind} that nbguard knows how to ask")
