"""Has two batches of the steady state recorded, where the first shows which storages there are, the second is measured."""

from __future__ import annotations

from typing import Any

from nbguard.memory.scan.heap.graph_look import look_at, tensors_of
from nbguard.training.profiler.analysis.memory import categories as memory
from nbguard.training.profiler.analysis.memory.categories import Stock
from nbguard.training.profiler.analysis.memory.memory_report import Level
from nbguard.training.profiler.analysis.memory.recorded_batch import PhaseEnd, RecordedBatch, read_batch
from nbguard.training.profiler.analysis.time import phases
from nbguard.training.profiler.instruments.memory.allocation_recording import recorder_for
from nbguard.training.profiler.instruments.memory.categories import Addresses
from nbguard.training.profiler.instruments.memory.counters import MemoryCounter
from nbguard.training.profiler.record.recorder import Recorder

_STEADY = 3
"""Training batches before the two."""
_PATIENCE = 8
"""Batches to record at most, where the second one is of a validation."""


class DeepWatch:
    """Records two batches of a fit. Their times are marked as disturbed."""

    def __init__(self, recorder: Recorder, counter: MemoryCounter, start: int) -> None:
        self.is_recording = False
        self.result: RecordedBatch | None = None
        self.note = "no batch was recorded, because no two training batches after the third followed each other"
        self._recorder = recorder
        self._recording = recorder_for(counter)
        self._start = start
        self._stock: Stock | None = None
        self._marks: list[PhaseEnd] = []
        self._batches = 0
        self._is_over = False

    def boundary(self, training: int, is_training: bool, level: Level) -> None:
        """Say that a batch ended; `training` of them so far were for training, this one if `is_training`."""
        if self.is_recording:
            self._batches += 1
            self.mark(phases.OTHER, level)
            if (is_training and self._batches > 1 and self._stock is not None) or self._batches > _PATIENCE:
                self.stop()
        elif is_training and training >= _STEADY and not self._is_over:
            self._is_over = True
            self.note = self._recording.start()
            self.is_recording = not self.note
            self._recorder.look_at(_PATIENCE + 1)
        if self.is_recording:
            self._recorder.boundary("disturbed")
            self._stock = None
            self._marks = [PhaseEnd(self._recording.position(), phases.OTHER, level.allocated)]

    def mark(self, phase: str, level: Level) -> None:
        """Say that a phase ended."""
        self._marks.append(PhaseEnd(self._recording.position(), phase, level.allocated))

    def name(self, stock: Stock, addresses: Addresses) -> None:
        """Note the owners of the storages that live now, before the optimizer's step."""
        self._stock = stock
        self._recording.name(addresses)

    def saves(self, loss: Any) -> None:
        """Note what the graph of a loss has saved for its backward pass, which is about to run."""
        look = look_at(tensors_of(loss)) if self.is_recording else None
        if look is not None:
            self._recording.name({address: (memory.ACTIVATIONS, nbytes) for address, nbytes in look.blocks.items()})

    def stop(self) -> None:
        """End the recording, wherever it is."""
        if not self.is_recording:
            return
        self.is_recording = False
        recorded = self._recording.stop()
        if self._batches < 2 or self._stock is None:
            self.note = "the fit ended before a second training batch could be recorded"
        elif recorded is None:
            self.note = "the two batches allocated too often to be recorded as a whole"
        else:
            self.result = read_batch(recorded[0], self._marks, recorded[1], self._stock, self._start)
