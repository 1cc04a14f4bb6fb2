"""Follows a GPU through a fit by events in its stream, and never waits for it."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.gpu import GpuMark, GpuObservations
from nbguard.training.profiler.instruments.memory.categories import device_of
from nbguard.training.profiler.record.recorder import Event, Recorder

_BEGINS: tuple[Event, ...] = ("forward", "loss", "step", "zero_grad")  # of phases: other code ran before
_PENDING = 4096  # events that the GPU has not come to: then it is followed no further
_KEPT = 200_000  # marks
_LAST = 1.0  # seconds to wait at the end for events of the last batches
_LOOKS = 250_000_000  # ns between two questions to the driver


class GpuWatch:
    """Records events where phases begin and end, on the stream that the model's device uses, in sampled batches."""

    watches = "the GPU's own times"

    def __init__(self) -> None:
        self._marks: list[GpuMark] = []
        self._pending: deque[tuple[Any, int, str, int]] = deque()
        self._free: list[Any] = []
        self._last: Any = None  # the latest event that the GPU came to, and when by its clock
        self._now = 0
        self._batch = 0
        self._is_chained = False
        self._device: Any = None
        self._nvml: NvmlReader | None = None
        self._used: list[float] = []
        self._looked = 0
        self._why_not = "the fit did not use a CUDA device"
        self._name = ""

    def start(self, recorder: Recorder) -> None:
        """Watch for the first batch that goes to a CUDA device."""
        self._recorder = recorder
        recorder.subscribe("model", self._on_model)

    def stop(self) -> None:
        """Read the events that the GPU comes to within a second; the rest is left."""
        try:
            end = time.monotonic() + _LAST
            while not self._read() and time.monotonic() < end:
                time.sleep(0.001)
        finally:
            self._pending.clear()
            self._free.clear()
            self._last = self._device = None
            self._close_driver()

    def observe(self) -> GpuObservations:
        """Return the events that the GPU came to, and the driver's readings."""
        return GpuObservations(tuple(self._marks), tuple(self._used), self._why_not, self._name)

    def _on_batch(self, number: int) -> None:
        is_next, before = number == self._batch + 1, self._batch
        self._batch = number
        if is_next:
            self._record(phase_log.OTHER, before)
        else:  # batches between have not been followed
            self._is_chained = False
            self._record("")
        self._read()
        self._ask_driver()

    def _on_phase(self, code: int) -> None:
        self._record(self._recorder.phase(code))

    def _on_begin(self, *_: Any) -> None:
        self._record(phase_log.OTHER)

    def _on_model(self, module: Any, args: Any) -> None:
        self._device = _gpu_of(module, args)
        if self._device is not None:
            self._why_not = ""
            self._name = str(sys.modules["torch"].cuda.get_device_properties(self._device).name)
            self._recorder.unsubscribe("model", self._on_model)
            self._recorder.subscribe("batch", self._on_batch)
            self._recorder.subscribe("phase", self._on_phase)
            for event in _BEGINS:
                self._recorder.subscribe(event, self._on_begin)
            self._nvml = NvmlReader().__enter__()

    def _record(self, phase: str, batch: int | None = None) -> None:
        """Put an event into the stream, with the phase that ended; none while a CUDA graph is recorded."""
        cuda = sys.modules["torch"].cuda
        is_full = len(self._pending) >= _PENDING or len(self._marks) >= _KEPT
        if self._recorder.batches != self._batch or is_full or cuda.is_current_stream_capturing():
            self._is_chained = False
            return
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        stream = cuda.current_stream(self._device)
        now = self._recorder.clock()  # not after: another thread may come between, and the GPU not come before its time
        event.record(stream)
        self._pending.append((event, batch or self._batch, phase if self._is_chained else "", now))
        self._is_chained = True

    def _read(self) -> bool:
        """Read the events that the GPU came to; say whether there are no others.

        None is asked while a CUDA graph is recorded: the question alone would make the recording fail.
        """
        if self._pending and sys.modules["torch"].cuda.is_current_stream_capturing():
            return False
        while self._pending:
            event, batch, phase, host = self._pending[0]
            if not event.query():
                return False
            self._pending.popleft()
            if self._last is not None:
                self._now += round(self._last.elapsed_time(event) * 1e6)
                self._free.append(self._last)
            self._last = event
            self._marks.append(GpuMark(batch, phase, host, self._now))
        return True

    def _ask_driver(self) -> None:
        """Ask the driver how busy it thinks the device is, four times a second at most."""
        now = self._recorder.clock()
        if self._nvml is None or now - self._looked < _LOOKS:
            return
        self._looked = now
        properties = sys.modules["torch"].cuda.get_device_properties(self._device)
        used = self._nvml.utilization(properties, self._device.index)
        if used is None:
            self._close_driver()
        else:
            self._used.append(used)

    def _close_driver(self) -> None:
        if self._nvml is not None:
            self._nvml.__exit__(None, None, None)
            self._nvml = None


def _gpu_of(module: Any, args: Any) -> Any | None:
    """Return the CUDA device that a call of a module uses; None if it uses none."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    name = device_of(module, args)
    return torch.device(name) if name.startswith("cuda") else None
