"""Memory as a part of a profile, which chooses a counter, and leaves the rest to the timeline of its device."""

from __future__ import annotations

import weakref
from typing import Any

from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.memory.memory_report import Level, MemoryObservations
from nbguard.training.profiler.instruments.memory.categories import OlderStorages, device_of
from nbguard.training.profiler.instruments.memory.counters import MemoryCounter, heap, open_gpus
from nbguard.training.profiler.instruments.memory.timeline import MemoryTimeline
from nbguard.training.profiler.record.recorder import Recorder

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
