"""The most memory that a test's tensors take at a time, for tests with a mark."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nbguard.memory.scan.devices.counters import counted_devices
from nbguard.memory.scan.devices.cuda import nested_stats


class CpuPeak:
    """The bytes of CPU tensors that a test makes, and their peak, by the births and deaths of their storages.

    Storages that a test only uses, a session's model say, do not count, and neither do the temporaries inside of an operation.
    """

    def __init__(self) -> None:
        from nbguard.memory.scan.storage_events import StorageMode

        self.peak = 0
        self._sizes: list[int] = []
        self._now = 0
        self._mode = StorageMode(self, "cpu")

    def born(self, nbytes: int, op: object, *, is_older: bool) -> int:
        """Count a storage that an operation has made; return its number."""
        del op
        self._sizes.append(0 if is_older else nbytes)
        self._now += self._sizes[-1]
        self.peak = max(self.peak, self._now)
        return len(self._sizes) - 1

    def died(self, token: int) -> None:
        """Count a storage no longer."""
        self._now -= self._sizes[token]

    def phase(self) -> AbstractContextManager[Any]:
        """Return the context around a phase of the test."""
        return self._mode


class CudaPeak:
    """The most that was allocated on one device above the bytes that were there before the test, by the allocator's counters.

    A peak that rose is the test's own. One that did not bounds it from above; only where that is more than the limit, as an
    earlier test took more, the counter is reset before the test.
    """

    def __init__(self, limit: int) -> None:
        self._torch: Any = sys.modules["torch"]
        self._before = {device.device: device for device in self._devices()}
        for device in self._before.values():
            if (device.peak or 0) - device.allocated > limit:
                self._torch.cuda.reset_peak_memory_stats(device.device)

    def _devices(self) -> Any:
        return counted_devices(nested_stats(self._torch)) if self._torch.cuda.is_initialized() else ()

    @property
    def peak(self) -> int:
        """Return the bytes, or a bound that is within the limit."""
        peaks = [0]
        for device in self._devices():
            before = self._before.get(device.device)
            peaks.append((device.peak or 0) - (0 if before is None else before.allocated))
        return max(peaks)

    def phase(self) -> AbstractContextManager[Any]:
        """Return the context around a phase of the test."""
        return nullcontext()


def peak_of(tracked: str, limit: int) -> CpuPeak | CudaPeak | None:
    """Return the measure of a test's peak on a kind of device, or None if it has none."""
    return CpuPeak() if tracked == "cpu" else CudaPeak(limit) if tracked == "cuda" else None
