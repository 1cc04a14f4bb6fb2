"""The difference of two snapshot files, that is, bytes that came and went, by holder and by pool, in figures that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nbguard.memory.reports.report import DeviceReport
from nbguard.memory.snapshots.load import Progress, load_named
from nbguard.memory.snapshots.report import SnapshotReport, report_of
from nbguard.render.result import Result


@dataclass(frozen=True, slots=True)
class SizeChange:
    """The bytes of one holder or pool in two snapshot files."""

    label: str
    before: int  # bytes in the first file
    after: int  # bytes in the second file
    grown: int  # `after` less `before`


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDiff:
    """The changes on one device."""

    device: str  # as torch calls it: "cuda:0"
    allocated: SizeChange  # bytes of blocks in use
    reserved: SizeChange  # bytes of segments
    holders: tuple[SizeChange, ...]  # add up to `allocated`; a holder whose bytes are the same is left out
    pools: tuple[SizeChange, ...]  # add up to `reserved`; a pool whose bytes are the same is left out


@dataclass(frozen=True, slots=True)
class SnapshotDiff(Result):
    """The changes from one snapshot file to another."""

    kind: ClassVar[str] = "diff"
    view: ClassVar[str] = "nbguard.memory.snapshots.saved_view:diff_blocks"

    before: str  # name of the first file
    after: str  # name of the second file
    devices: tuple[DeviceDiff, ...]  # in the order of their numbers
    notes: tuple[str, ...] = ()  # sentences on what to know when reading the figures


def snapshot_diff(before: str | Path, after: str | Path, progress: Progress | None = None) -> SnapshotDiff:
    """Return the bytes that came and went between two snapshot files, by holder and by pool.

    Raises:
        SnapshotError: one of the files cannot be read.
    """
    (first, first_names), (second, second_names) = load_named(before, progress), load_named(after, progress)
    notes: tuple[str, ...] = ()
    if (first_names.holders is None) != (second_names.holders is None):
        without = Path(before if first_names.holders is None else after).name
        notes = (f"{without} has no names file next to it, so both are compared by their allocating lines",)
        first_names, second_names = replace(first_names, holders=None), replace(second_names, holders=None)
    return difference(report_of(before, first, first_names), report_of(after, second, second_names), notes)


def difference(before: SnapshotReport, after: SnapshotReport, notes: tuple[str, ...] = ()) -> SnapshotDiff:
    """Return the changes from the report `before` to the report `after`."""
    first, second = ({device.device: device for device in saved.report.devices} for saved in (before, after))
    devices = tuple(_device(name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
    return SnapshotDiff(before.file, after.file, devices, notes)


def _device(name: str, before: DeviceReport | None, after: DeviceReport | None) -> DeviceDiff:
    holders = [{row.label: row.retained for row in device.holders} if device is not None else {} for device in (before, after)]
    pools = [
        {pool.name: pool.space.reserved for pool in device.pools} if device is not None else {} for device in (before, after)
    ]
    return DeviceDiff(
        device=name,
        allocated=_change("allocated", *(sum(sizes.values()) for sizes in holders)),
        reserved=_change("reserved", *(sum(sizes.values()) for sizes in pools)),
        holders=_changes(*holders),
        pools=_changes(*pools),
    )


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[SizeChange, ...]:
    labels = [label for label in dict.fromkeys((*after, *before)) if before.get(label, 0) != after.get(label, 0)]
    rows = (_change(label, before.get(label, 0), after.get(label, 0)) for label in labels)
    return tuple(sorted(rows, key=lambda row: (-abs(row.grown), row.label)))


def _change(label: str, before: int, after: int) -> SizeChange:
    return SizeChange(label, before, after, after - before)
