"""Counters of allocators and of the process at one moment: what a hook reads after a cell and what a tick reads."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.memory.facts import DeviceFacts
from nbguard.units import MiB

NOTICED = MiB
"""Without an allocator's counters (CPU tensors), a change of the process's heap by so many bytes is looked into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the allocator of one device counts. `peak` has grown since the start, or since somebody reset it.

    `allocations` is how many there have ever been: it tells that memory was freed and allocated anew.
    """

    device: str
    allocated: int
    reserved: int | None = None
    peak: int | None = None
    allocations: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """All counters at one moment.

    `heap`: bytes in use by the whole process, where no device counts its own, as `source` tells them: "malloc", or
    "resident", which are not to be compared.
    """

    devices: tuple[Counted, ...] = ()
    heap: int | None = None
    source: str = ""

    def differs(self, other: Reading | None) -> bool:
        """Say whether memory has changed between two readings, as far as counters tell."""
        if other is None or self.devices != other.devices:
            return True
        if self.devices:
            return False
        grown = self.grown_since(other)
        return grown is None or abs(grown) >= NOTICED

    def grown_since(self, other: Reading) -> int | None:
        """Return the bytes by which the process has grown; None if that is not known."""
        if self.heap is None or other.heap is None or self.source != other.source:
            return None
        return self.heap - other.heap

    def of(self, device: str) -> Counted:
        """Return the counters of `device`; a device that was not in use had nothing."""
        return next(
            (each for each in self.devices if each.device == device),
            Counted(device=device, allocated=0, reserved=0, peak=0, allocations=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReading:
    """All counters at one moment. `tracked` is empty before PyTorch is imported.

    `devices` have their allocator's counters and no segments. Where no device counts, `process` are the bytes of the whole
    process, as `source` tells them: `malloc` or `resident`.
    """

    tracked: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    pid: int = 0
    process: int | None = None
    source: str = ""

    @property
    def in_use(self) -> dict[str, int]:
        """Return the bytes in use by device: in tensors, or by the process; none of devices that this process has not used."""
        if self.process is not None:
            return {device.device: self.process for device in self.devices}
        return {each.device: each.allocator.allocated for each in self.devices if each.allocator and each.allocator.reserved}

    @property
    def peak(self) -> int | None:
        """Return the most that was allocated on one device; None where no device counts it."""
        peaks = (device.allocator.peak_allocated for device in self.devices if device.allocator is not None)
        return max((peak for peak in peaks if peak is not None), default=None)
