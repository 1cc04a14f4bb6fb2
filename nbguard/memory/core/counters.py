"""Counters of allocators and of the process at one moment, for the hook after a cell, and for a tick."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.memory.core.facts import DeviceFacts
from nbguard.units import MiB

NOTICED = MiB
"""Without an allocator's counters (CPU tensors), a change of the process's heap by so many bytes leads to a scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counters of the allocator of one device, in bytes, as `torch.cuda.memory_stats` names them."""

    device: str  # `cuda:0`
    allocated: int  # allocated_bytes.all.current
    reserved: int | None = None  # reserved_bytes.all.current
    peak: int | None = None  # allocated_bytes.all.peak: since the start, or since somebody reset it
    allocations: int | None = None  # allocation.all.allocated: all ever made; more than the present ones after frees


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
        """Return the growth of the process in bytes, or None if it is unknown."""
        if self.heap is None or other.heap is None or self.source != other.source:
            return None
        return self.heap - other.heap

    def grown_by(self, before: Reading) -> int:
        """Return the growth of memory in bytes since a reading, as far as counters tell."""
        if self.devices:
            return sum(counted.allocated - before.of(counted.device).allocated for counted in self.devices)
        return self.grown_since(before) or 0

    def of(self, device: str) -> Counted:
        """Return the counters of `device`; a device that was not in use had nothing."""
        return next(
            (counted for counted in self.devices if counted.device == device),
            Counted(device=device, allocated=0, reserved=0, peak=0, allocations=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TickReading:
    """All counters of one tick."""

    tracked: str = ""  # kind of device whose tensors are tracked; empty before PyTorch is imported
    devices: tuple[DeviceFacts, ...] = ()  # with the counters of their allocators, without segments
    pid: int = 0  # of this process
    process: int | None = None  # bytes of the whole process, where no device counts its own
    source: str = ""  # of `process`: `malloc` (mallinfo2) or `resident` (pages in memory)
    counted: tuple[Counted, ...] = ()  # the same counters as a hook reads them, to compare; none where they are not counted

    @property
    def in_use(self) -> dict[str, int]:
        """Return the bytes in use by device: in tensors, or by the process; none of devices that this process has not used."""
        if self.process is not None:
            return {device.device: self.process for device in self.devices}
        return {
            facts.device: facts.allocator.allocated for facts in self.devices if facts.allocator and facts.allocator.reserved
        }

    @property
    def peak(self) -> int | None:
        """Return the most that was allocated on one device; None where no device counts it."""
        peaks = (device.allocator.peak_allocated for device in self.devices if device.allocator is not None)
        return max((peak for peak in peaks if peak is not None), default=None)
