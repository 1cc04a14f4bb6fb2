"""The report, per device the parts of its memory and the holders of the allocated bytes, that add up, and its view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.cleanup.plan.parking import default_plan, holders_of, parts_of_device
from nbguard.memory.core.advice import Finding
from nbguard.memory.core.analysis import NOT_OURS, Analysis, DeviceAnalysis, Part, other_processes, others_line
from nbguard.memory.core.device_view import holder_rows, holder_table, parts_bar, pool_table
from nbguard.memory.core.facts import PinnedFacts, ProcessFact, Unavailable
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.requests import Pool
from nbguard.memory.reports.findings import find
from nbguard.render.html import Block, Line, Listing, Section, Title
from nbguard.render.result import Result
from nbguard.units import MiB, counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """The report on one device. All sizes are bytes."""

    device: str  # name in torch: `cuda:0`
    name: str  # name of the product
    total: int | None  # its size; None where it is not known
    allocated: int  # bytes that its holders hold
    parts: tuple[Part, ...]  # add up to `total`, where that is known
    holders: tuple[Holder, ...]  # add up to `allocated`, the largest first
    storages: int  # number of tensors' storages on it
    others: tuple[ProcessFact, ...] = ()  # other processes on it, the largest first; none where the driver does not list them
    pools: tuple[Pool, ...] = ()  # add up to the allocator's reserved bytes: the parts up to `context`

    @property
    def kernel(self) -> int:
        """Return the bytes that this kernel takes from the device."""
        return sum(part.nbytes for part in self.parts if part.name not in NOT_OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Result):
    """The report of `%gpumem`. Frozen numbers and words: keeping one keeps nothing else alive."""

    kind: ClassVar[str] = "report"
    view: ClassVar[str] = "nbguard.memory.reports.report:report_blocks"

    tracked: str  # kind of device whose tensors are tracked
    devices: tuple[DeviceReport, ...]  # one report each
    findings: tuple[Finding, ...]  # findings, in sentences
    unavailable: tuple[Unavailable, ...]  # readings that could not be made
    stale: int  # bytes that the default cleanup frees
    pinned: PinnedFacts | None = None  # torch's page-locked host memory; None where it is not in use

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
        return replace(self, devices=tuple(report for report in self.devices if report.device in (wanted, device)))


def build_report(analysis: Analysis) -> Report:
    """Return the report on a scan."""
    facts = analysis.facts
    return Report(
        tracked=facts.tracked,
        devices=tuple(map(_device, analysis.devices)),
        findings=find(analysis),
        unavailable=facts.unavailable,
        stale=analysis.once(default_plan).promised,
        pinned=facts.pinned,
    )


def _device(device: DeviceAnalysis) -> DeviceReport:
    holders = device.once(holders_of)
    return DeviceReport(
        device=device.name,
        name=device.facts.name,
        total=device.facts.total,
        allocated=sum(holder.retained for holder in holders),
        parts=device.once(parts_of_device),
        holders=holders,
        storages=sum(storage.device == device.name for storage in device.analysis.facts.graph.storages),
        others=other_processes(device.facts, device.analysis.facts.pid),
        pools=device.pools,
    )


# --- The report as blocks, per device its parts, holders and pools; then findings.


def report_blocks(report: Report, limit: int | None = 12) -> Iterator[Block]:
    """Yield a report; at most `limit` holders per device, without a limit all, the small ones too."""
    if report.headline:
        yield Title(report.headline, "dim")
    for device in report.devices:
        yield from _device_of_report_view(device, limit)
    if report.pinned is not None and report.pinned.reserved >= MiB:
        yield Line(_pinned(report.pinned), "dim")
    if report.findings:
        yield Listing(sentences=tuple(finding.sentence for finding in report.findings), mark="•")
    if report.unavailable:
        yield Listing(sentences=tuple(missing.reason for missing in report.unavailable))


def _device_of_report_view(device: DeviceReport, limit: int | None) -> Iterator[Block]:
    if device.total is None:
        figures = f"{format_bytes(device.allocated)} in {counted(device.storages, 'storage')}"
    else:
        figures = f"this kernel {format_bytes(device.kernel)} of {format_bytes(device.total)}"
    yield Section(device.device, device.name, figures)
    if len(device.parts) > 1:
        yield parts_bar(device.parts, device.total, figures)
    if words := others_line(device.others):
        yield Line(words, "dim")
    if device.holders:
        yield holder_table(holder_rows(device.holders, device.allocated, limit))
    else:
        yield Line("nothing is held here", "dim")
    if (pools := pool_table(device.pools)) is not None:
        yield pools


def _pinned(pinned: PinnedFacts) -> str:
    """Return the sentence on page-locked host memory."""
    held = f"pinned host memory {format_bytes(pinned.reserved)}"
    if pinned.active is None or pinned.unused is None:
        return f"{held} (not of the device): this PyTorch does not tell how much of it is in use"
    in_use, kept = format_bytes(pinned.active), format_bytes(pinned.unused)
    return f"{held}: {in_use} in use, {kept} kept for later (not of the device)"
