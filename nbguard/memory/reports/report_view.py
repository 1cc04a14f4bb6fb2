"""The report as blocks, per device its parts, holders and pools; then findings."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core.breakdown import others_line
from nbguard.memory.core.facts import PinnedFacts
from nbguard.memory.core.views.device import holder_rows, holder_table, parts_bar, pool_table
from nbguard.memory.reports.report import DeviceReport, Report
from nbguard.render.blocks import Block, Line, Listing, Section, Title
from nbguard.units import MiB, counted, format_bytes


def report_blocks(report: Report, limit: int | None = 12) -> Iterator[Block]:
    """Yield a report; at most `limit` holders per device, without a limit all, the small ones too."""
    if report.headline:
        yield Title(report.headline, "dim")
    for device in report.devices:
        yield from _device(device, limit)
    if report.pinned is not None and report.pinned.reserved >= MiB:
        yield Line(_pinned(report.pinned), "dim")
    if report.findings:
        yield Listing(sentences=tuple(finding.sentence for finding in report.findings), mark="•")
    if report.unavailable:
        yield Listing(sentences=tuple(missing.reason for missing in report.unavailable))


def _device(device: DeviceReport, limit: int | None) -> Iterator[Block]:
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
