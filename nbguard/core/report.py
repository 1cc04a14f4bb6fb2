"""The report: per device the parts of its memory and who holds the allocated bytes, in columns that re-add."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbguard.core.cleanup import plan_cleanup
from nbguard.core.facts import DeviceFacts, Facts, Unavailable
from nbguard.core.findings import Finding, find
from nbguard.core.fragmentation import fragmentation
from nbguard.core.ownership import Holder, holders
from nbguard.core.plan import Request


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a device's memory, in bytes. `note` explains it in a few words."""

    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device: `parts` re-add to `total` (where the device's size is known), `holders` to `allocated`."""

    device: str
    name: str
    total: int | None
    allocated: int
    parts: tuple[Part, ...]
    holders: tuple[Holder, ...]
    storages: int
    largest_free: int | None = None

    @property
    def kernel(self) -> int:
        """Return the bytes that this kernel takes from the device."""
        return sum(part.nbytes for part in self.parts if part.name not in ("others", "others and contexts", "free"))


@dataclass(frozen=True, slots=True)
class Report:
    """What `%gpumem` says. Frozen numbers and words: keeping one keeps nothing else alive."""

    tracked: str
    devices: tuple[DeviceReport, ...]
    findings: tuple[Finding, ...]
    unavailable: tuple[Unavailable, ...]
    stale: int

    @property
    def headline(self) -> str:
        """Return the report's first line where no accelerator is tracked, else an empty string."""
        if self.tracked == "cpu":
            return "No GPU in this process: CPU tensors are tracked instead"
        return ""

    def only(self, device: str) -> Report:
        """Return the report on one device, `cuda:0` or `0`."""
        wanted = f"{self.tracked}:{device}" if device.isdigit() else device
        return replace(self, devices=tuple(found for found in self.devices if found.device in (wanted, device)))


def build_report(facts: Facts) -> Report:
    """Return the report on `facts`."""
    plan = plan_cleanup(facts, Request())
    devices = tuple(_device(facts, device) for device in facts.devices)
    return Report(facts.tracked, devices, find(facts, plan), facts.unavailable, plan.promised)


def _device(facts: Facts, device: DeviceFacts) -> DeviceReport:
    rows = holders(facts.graph, device.device)
    attributed = sum(row.retained for row in rows)
    allocated = attributed
    if device.allocator is not None:
        allocated = max(attributed, device.allocator.allocated)
        if allocated > attributed:
            rows = (*rows, _not_from_python(allocated - attributed))
    storages = sum(storage.device == device.device for storage in facts.graph.storages)
    parts, largest = _parts(facts, device, allocated)
    return DeviceReport(device.device, device.name, device.total, allocated, parts, rows, storages, largest)


def _not_from_python(nbytes: int) -> Holder:
    what = "workspaces, CUDA graphs, C++"
    return Holder("not held by Python", "library", nbytes, nbytes, None, what, stale=False, roots=())


def _parts(facts: Facts, device: DeviceFacts, allocated: int) -> tuple[tuple[Part, ...], int | None]:
    """Return the parts of a device's memory, and the largest free block of the cache."""
    if device.allocator is None:
        return (Part("allocated", allocated),), None
    if device.segments is None:
        cached = max(0, device.allocator.reserved - allocated)
        return (Part("allocated", allocated), Part("cached", cached, "reserved and free")), None
    found = fragmentation(device.segments)
    parts = [
        Part("allocated", found.allocated),
        Part("releasable", found.releasable, "an empty cache gives it back"),
        Part("stranded", found.stranded, "free, but between live blocks"),
    ]
    if found.pending:
        parts.append(Part("pending", found.pending, "freed, waiting for another stream"))
    if device.total is not None and device.free is not None:
        used = device.total - device.free
        outside = max(0, used - found.reserved)
        known = _others(facts, device)
        if known is None:
            parts.append(
                Part("others and contexts", outside, "other processes and CUDA contexts; the driver does not say which")
            )
        else:
            count, others = known
            others = min(others, outside)
            parts.append(Part("context", outside - others, "CUDA itself in this kernel"))
            parts.append(Part("others", others, f"{count} other process{'es' if count != 1 else ''}"))
        parts.append(Part("free", device.total - found.reserved - outside))
    return tuple(parts), found.largest_free


def _others(facts: Facts, device: DeviceFacts) -> tuple[int, int] | None:
    """Return (how many other processes use the device, their bytes), or None where the driver does not say."""
    if device.nvml is None or device.nvml.processes is None:
        return None
    others = [process for process in device.nvml.processes if process.pid != facts.pid]
    if any(process.used is None for process in others):
        return None
    return len(others), sum(process.used or 0 for process in others)
