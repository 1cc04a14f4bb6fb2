"""Counters of memory, torch's for a GPU, a simulated device's, malloc's for tensors of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nbguard.memory.core.simulated import DEVICE
from nbguard.memory.scan.devices.counters import heap_reader
from nbguard.memory.scan.devices.cuda import memory_fraction
from nbguard.memory.scan.devices.reserve import device_counters
from nbguard.training.profiler.analysis.memory.growth import CUDA, Level

BLOCK = 512
"""Unit in bytes that CUDA's allocator rounds up to."""


class MemoryCounter(Protocol):
    """Reads the counters of one device.

    `tensors_on` is where torch says that the tensors are which are counted; storages take a multiple of `rounding` bytes.
    """

    device: str
    tensors_on: str
    source: str
    rounding: int

    @property
    def capacity(self) -> int | None:
        """Return the bytes that PyTorch may take of the device, or None without a limit."""

    def read(self) -> Level:
        """Return the counters now. Changes nothing."""


class CudaCounter:
    """PyTorch's own counters of a GPU in use. Read as torch nests them: flattened they cost several times as much."""

    source = CUDA
    rounding = BLOCK

    def __init__(self, index: int) -> None:
        self.device = self.tensors_on = f"cuda:{index}"
        self.index = index

    @property
    def capacity(self) -> int | None:
        """Return the device's memory, or its part by `set_per_process_memory_fraction`."""
        total = int(sys.modules["torch"].cuda.get_device_properties(self.index).total_memory)
        fraction = memory_fraction(self.index)
        return total if fraction is None else int(fraction * total)

    def read(self) -> Level:
        """Return the counters now; all 0 before the device is used."""
        stats = device_counters(self.index)
        if not stats:
            return Level(0, 0, 0, 0)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Level(allocated["current"], reserved["current"], allocated["peak"], reserved["peak"])


class SimulatedStats(Protocol):
    """The result of `nbguard.simulate`, as far as its counters go."""

    def memory_stats(self) -> Mapping[str, Any]:
        """Return counters by the names of `torch.cuda.memory_stats()`."""

    def mem_get_info(self) -> tuple[int, int]:
        """Return (free, size) of the device in bytes."""


class SimulatedCounter:
    """The counters of a simulated device."""

    device = DEVICE
    tensors_on = "cpu"
    source = "simulated device"
    rounding = BLOCK

    def __init__(self, simulation: SimulatedStats) -> None:
        self._simulation = simulation

    @property
    def capacity(self) -> int | None:
        """Return the size of the device."""
        return self._simulation.mem_get_info()[1]

    def read(self) -> Level:
        """Return the counters now."""
        stats = self._simulation.memory_stats()
        allocated, peak = (int(stats[f"allocated_bytes.all.{which}"]) for which in ("current", "peak"))
        reserved, peak_reserved = (int(stats[f"reserved_bytes.all.{which}"]) for which in ("current", "peak"))
        return Level(allocated, reserved, peak, peak_reserved)


class HeapCounter:
    """The bytes that malloc has handed out to the whole process: tensors of the CPU, and all else. It keeps no peak.

    Batches from a loader's workers lie in shared memory instead, and do not count.
    """

    source = "heap of the process"
    device = tensors_on = "cpu"
    rounding = 1
    capacity = None

    def __init__(self, in_use: Callable[[], int]) -> None:
        self._in_use = in_use

    def read(self) -> Level:
        """Return the bytes in use now."""
        return Level(self._in_use())


def heap() -> list[MemoryCounter]:
    """Return the counter of this process's malloc, if it knows how much is in use."""
    in_use = heap_reader()
    return [] if in_use is None else [HeapCounter(in_use)]


def open_gpus() -> list[MemoryCounter]:
    """Return a counter for each GPU, if CUDA is in use: it is never initialised by asking."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [CudaCounter(index) for index in range(torch.cuda.device_count())]
