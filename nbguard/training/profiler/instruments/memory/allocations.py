"""Allocations of two batches one by one, a GPU's by the allocator's own history, others by torch's operations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nbguard.memory.scan.devices.allocation_sites import Sites, stack_of
from nbguard.memory.scan.heap.graph_scan import look_at, tensors_of
from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis.memory import recorded_batch as memory
from nbguard.training.profiler.analysis.memory.growth import Level
from nbguard.training.profiler.analysis.memory.recorded_batch import AllocationEvent, PhaseEnd, RecordedBatch, Stock, read_batch
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.instruments.memory.categories import Addresses
from nbguard.training.profiler.instruments.memory.counters import BLOCK, CudaCounter, MemoryCounter
from nbguard.training.profiler.record.recorder import Recorder

_MOST_EVENTS = 500_000
_DEEPEST = 100


class AllocationRecorder(Protocol):
    """Records the allocations of one device, and when they are freed."""

    def start(self) -> str:
        """Begin; return the reason why that is not possible, in words, or an empty string."""

    def position(self) -> int:
        """Return how many events there have been."""

    def name(self, addresses: Addresses) -> None:
        """Note the owners of the storages that live now."""

    def stop(self) -> tuple[tuple[AllocationEvent, ...], dict[int, str]] | None:
        """End, and return the events and the categories of the blocks that were named; None if it is not complete."""


def recorder_for(counter: MemoryCounter) -> AllocationRecorder:
    """Return the recorder for the device of a counter."""
    return HistoryRecorder(counter.index) if isinstance(counter, CudaCounter) else OperationRecorder(counter)


class OperationRecorder:
    """Storages of CPU tensors, followed from operation to operation. Those older than the recording are not counted."""

    def __init__(self, counter: MemoryCounter) -> None:
        self._rounding = counter.rounding
        self._events: list[AllocationEvent] = []
        self._names: dict[int, str] = {}
        self._sites: Sites | None = None
        self._blocks = 0
        self._mode: Any = None

    def start(self) -> str:
        """Enter the dispatch mode."""
        if has_compiled():
            return "torch.compile is in use, whose code makes no operations that could be followed"
        from nbguard.memory.scan.storage_events import StorageMode

        self._sites = Sites()
        self._mode = StorageMode(self)
        self._mode.__enter__()
        return ""

    def born(self, nbytes: int, op: Any, *, is_older: bool) -> int:  # noqa: ARG002 - the line says more than the operation
        """Note a storage with the line that made it."""
        if is_older or len(self._events) >= _MOST_EVENTS or self._sites is None:
            return 0
        self._blocks += 1
        size = -(-nbytes // self._rounding) * self._rounding
        self._events.append(AllocationEvent(self._blocks, size, self._sites.of(stack_of(sys._getframe(1), _DEEPEST))))
        return self._blocks

    def died(self, token: int) -> None:
        """Note a death."""
        if token:
            self._events.append(AllocationEvent(token))

    def position(self) -> int:
        """Return how many events there have been."""
        self._mode.settle()
        return len(self._events)

    def name(self, addresses: Addresses) -> None:
        """Note the owners of the storages."""
        places = self._mode.places()
        self._names |= {places[address]: kind for address, (kind, _) in addresses.items() if places.get(address)}

    def stop(self) -> tuple[tuple[AllocationEvent, ...], dict[int, str]] | None:
        """Leave the mode."""
        self._mode.leave()
        events, self._events, self._sites = tuple(self._events), [], None
        return (events, self._names) if len(events) < _MOST_EVENTS else None


class HistoryRecorder:
    """The history that PyTorch's own allocator keeps of one GPU, with Python's stacks."""

    def __init__(self, index: int) -> None:
        self._index = index
        from nbguard.memory.cleanup.apply import allocator_history  # only `--memory` needs it

        self._torch: Any = sys.modules["torch"]
        self._history = allocator_history
        self._began = 0
        self._named: dict[int, Addresses] = {}  # by the number of events before

    def start(self) -> str:
        """Switch the history on, unless somebody else records one."""
        if self._history.recording().state != "off":
            return "a history of the allocator is being recorded already, and is left alone"
        self._history.start(_MOST_EVENTS)
        self._began = self._counted()
        return ""

    def _counted(self) -> int:
        stats = self._torch.cuda.memory_stats_as_nested_dict(self._index)["allocation"]["all"]
        return int(stats["allocated"] + stats["freed"])

    def position(self) -> int:
        """Return how many events there have been, by the allocator's own count."""
        return self._counted() - self._began

    def name(self, addresses: Addresses) -> None:
        """Note the owners of the storages at this point of the history."""
        self._named[self.position()] = addresses

    def stop(self) -> tuple[tuple[AllocationEvent, ...], dict[int, str]] | None:
        """Read the history and switch it off."""
        expected = self.position()
        try:
            trace = self._torch.cuda.memory._snapshot()["device_traces"][self._index]
        finally:
            self._history.stop()
        recorded = self._events([entry for entry in trace if entry["action"] in ("alloc", "free_requested")])
        return recorded if len(recorded[0]) == expected else None

    def _events(self, trace: Sequence[Mapping[str, Any]]) -> tuple[tuple[AllocationEvent, ...], dict[int, str]]:
        sites = Sites()
        events: list[AllocationEvent] = []
        names: dict[int, str] = {}
        living: dict[int, int] = {}  # blocks by their address
        for number, entry in enumerate(trace, start=1):
            if entry["action"] == "alloc":
                living[entry["addr"]] = number
                size = -(-entry["size"] // BLOCK) * BLOCK
                events.append(AllocationEvent(number, size, sites.of(entry.get("frames", ()))))
            else:
                events.append(AllocationEvent(living.pop(entry["addr"], -number)))  # one that is older has a number of its own
            for address, (kind, _) in self._named.get(number, {}).items():
                if address in living:
                    names[living[address]] = kind
        return tuple(events), names


_STEADY = 3
"""Training batches before the two."""
_PATIENCE = 8
"""Batches to record at most, where the second one is of a validation."""


class DeepWatch:
    """Records two batches of a fit. Their times are marked as disturbed."""

    def __init__(self, recorder: Recorder, counter: MemoryCounter, start: int) -> None:
        self.is_recording: bool = False
        self.result: RecordedBatch | None = None
        self.note: str = "no batch was recorded, because no two training batches after the third followed each other"
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
            self.mark(phase_log.OTHER, level)
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
            self._marks = [PhaseEnd(self._recording.position(), phase_log.OTHER, level.allocated)]

    def mark(self, phase: str, level: Level) -> None:
        """Say that a phase ended."""
        self._marks.append(PhaseEnd(self._recording.position(), phase, level.allocated))

    def name(self, stock: Stock, addresses: Addresses) -> None:
        """Note the owners of the storages that live now, before the optimizer's step."""
        self._stock = stock
        self._recording.name(addresses)

    def saves(self, loss: Any) -> None:
        """Note the tensors that the graph of a loss has saved for its backward pass, which is about to run."""
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
