"""The memory of engines as blocks: one table, a row for each device of each engine, and the findings."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.frontend.cluster.analysis.engines import EngineDevice, EngineMemory, EnginesReport
from nbguard.render.blocks import Block, Listing, Table, TableRow, Title
from nbguard.units import counted, format_bytes


def engines_blocks(report: EnginesReport) -> Iterator[Block]:
    """Yield the table of the engines, and the findings."""
    silent = [engine for engine in report.engines if engine.answer.kind != "answered"]
    yield Title(f"{counted(len(report.engines), 'engine')}{f', {len(silent)} without an answer' if silent else ''}", "strong")
    yield Table(
        rows=tuple(row for engine in report.engines for row in _rows(engine)),
        names=("engine", "host", "pid", "GPUs visible", "device", "allocated", "reserved", "stale", "largest holder", "last"),
        figures=(0, 2, 5, 6, 7),
    )
    if report.findings:
        yield Listing(sentences=tuple(finding.sentence for finding in report.findings), mark="•")


def _rows(engine: EngineMemory) -> Iterator[TableRow]:
    who = (str(engine.engine), engine.host, str(engine.pid or ""), "" if engine.visible is None else engine.visible or "none")
    stale = format_bytes(engine.stale) if engine.answer.kind == "answered" else ""
    last = engine.answer.reason or engine.error
    if not engine.devices:
        yield TableRow(cells=(*who, "", "", "", stale, "", last))
    for number, device in enumerate(engine.devices):
        rest = ("", "") if number else (stale, last)
        yield TableRow(cells=(*(("",) * len(who) if number else who), *_device(device), rest[0], _holder(device), rest[1]))


def _device(device: EngineDevice) -> tuple[str, str, str]:
    reserved = "" if device.reserved is None else format_bytes(device.reserved)
    return f"{device.device} {device.name}".strip(), format_bytes(device.allocated), reserved


def _holder(device: EngineDevice) -> str:
    return f"{device.holder} {format_bytes(device.held)}" if device.holder else ""
