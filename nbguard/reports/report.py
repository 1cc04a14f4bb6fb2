"""The report: per device the parts of its memory and who holds the allocated bytes, in columns that re-add."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.cleanup.plan.plan import Plan, Request
from nbguard.cleanup.plan.planner import plan_cleanup
from nbguard.memory.breakdown import NOT_OURS, Part, parts_of
from nbguard.memory.facts import DeviceFacts, Facts, PinnedFacts, Unavailable
from nbguard.memory.finding import Finding
from nbguard.memory.graph import Holder
from nbguard.memory.pools import Pool, pools_in_use, pools_of
from nbguard.memory.unheld import all_holders
from nbguard.render.result import Result
from nbguard.reports.findings import find


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device: `parts` re-add to `total` (where the device's size is known), `holders` to `allocated`.

    `pools` re-add to what the allocator has reserved: the parts up to `context`.
    """

    device: str
    name: str
    total: int | None
    allocated: int
    parts: tuple[Part, ...]
    holders: tuple[Holder, ...]
    storages: int
    pools: tuple[Pool, ...] = ()

    @property
    def kernel(self) -> int:
        """Return the bytes that this kernel takes from the device."""
        return sum(part.nbytes for part in self.parts if part.name not in NOT_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Result):
    """What `%gpumem` says. Frozen numbers and words: keeping one keeps nothing else alive."""

    kind: ClassVar[str] = "report"
    view: ClassVar[str] = "nbguard.reports.report_view:report_blocks"

    tracked: str
    devices: tuple[DeviceReport, ...]
    findings: tuple[Finding, ...]
    unavailable: tuple[Unavailable, ...]
    stale: int
    pinned: PinnedFacts | None = None

    @property
    def headline(self) -> str:
        """Return the report's first line where no accelerator is tracked, else an empty string."""
        if self.tracked == "cpu":
            return "No GPU in this process: CPU tensors are tracked instead"
        if self.tracked == "simulated":
            return "Simulated device: a model of PyTorch's allocator, fed by your code on the CPU"
        return ""

    def only(self, device: str) -> Report:
        """Return the report on one device, `cuda:0` or `0`."""
        wanted = f"{self.tracked}:{device}" if device.isdigit() else device
        return replace(self, devices=tuple(found for found in self.devices if found.device in (wanted, device)))


def build_report(facts: Facts) -> Report:
    """Return the report on `facts`."""
    plan = plan_cleanup(facts, Request())
    devices = tuple(_device(facts, device, plan) for device in facts.devices)
    return Report(
        tracked=facts.tracked,
        devices=devices,
        findings=find(facts, plan),
        unavailable=facts.unavailable,
        stale=plan.promised,
        pinned=facts.pinned,
    )


def _device(facts: Facts, device: DeviceFacts, plan: Plan) -> DeviceReport:
    rows = all_holders(facts.graph, device, plan.storages)
    allocated = sum(row.retained for row in rows)
    storages = sum(storage.device == device.device for storage in facts.graph.storages)
    parts = parts_of(device, allocated, facts.pid, pools_in_use(facts))
    return DeviceReport(
        device=device.device,
        name=device.name,
        total=device.total,
        allocated=allocated,
        parts=parts,
        holders=rows,
        storages=storages,
        pools=pools_of(facts, device),
    )
