"""What snapshot files say, by `nbguard.snapshot_report`, `snapshot_map`, `snapshot_diff`: plain data that re-adds."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from nbguard.allocator.snapshot.read import load_snapshot
from nbguard.allocator.snapshot.sidecar import sidecar_path
from nbguard.allocator.snapshot.snapshot import Frame, Snapshot, SnapshotSegment
from nbguard.errors import SnapshotError
from nbguard.memory.facts import AllocatorStats, Block, DeviceFacts, Segment
from nbguard.memory.source_lines import line_words
from nbguard.reports.memory_map import MemoryMap
from nbguard.reports.report import Report
from nbguard.snapshots.saved import SnapshotDiff, SnapshotReport, difference, saved_device, saved_map

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Extra:
    """What only nbguard writes beside a snapshot: who held the blocks, by device, and which file was which cell."""

    names: Mapping[int, Mapping[int, str]] | None = None
    cells: Mapping[str, int] | None = None
    unnamed: int = 0
    is_of_another: bool = False


def snapshot_report(path: str | Path, progress: Progress | None = None) -> SnapshotReport:
    """Return what a snapshot file says, per device: who held what, and the allocator's pools.

    Holders are names where nbguard wrote the file, else the lines that allocated, where a history was recorded.

    Raises:
        SnapshotError: the file, or the one beside it, cannot be read.
    """
    snapshot, extra = read_named(path, progress)
    return _report(path, snapshot, extra)


def snapshot_map(path: str | Path, progress: Progress | None = None) -> MemoryMap:
    """Return the map of a snapshot file: segments and blocks, who held them, what pinned free memory.

    Raises:
        SnapshotError: the file, or the one beside it, cannot be read.
    """
    snapshot, extra = read_named(path, progress)
    return saved_map(Path(path).name, _devices(snapshot, extra), _notes(snapshot, extra))


def snapshot_diff(before: str | Path, after: str | Path, progress: Progress | None = None) -> SnapshotDiff:
    """Return what grew and what went between two snapshot files, by holder and by pool.

    Raises:
        SnapshotError: one of the files cannot be read.
    """
    (first, said), (second, too) = read_named(before, progress), read_named(after, progress)
    notes: tuple[str, ...] = ()
    if (said.names is None) != (too.names is None):
        without = Path(before if said.names is None else after).name
        notes = (f"{without} has no names beside it: both are told by the lines that allocated",)
        said, too = replace(said, names=None), replace(too, names=None)
    return difference(_report(before, first, said), _report(after, second, too), notes)


def read_named(path: str | Path, progress: Progress | None = None) -> tuple[Snapshot, Extra]:
    """Return a snapshot whose stacks say `In[7]` where a line is of that cell, and what else stands beside it."""
    path = _home(path)
    snapshot = load_snapshot(path, progress)
    extra = _extra(path)
    return (named_cells(snapshot, extra.cells) if extra.cells else snapshot), extra


def named_cells(snapshot: Snapshot, cells: Mapping[str, int]) -> Snapshot:
    """Return a snapshot with the files that IPython compiled cells as called by the cells: `In[7]`."""
    stacks = tuple(tuple(_named(frame, cells) for frame in stack) for stack in snapshot.stacks)
    return replace(snapshot, stacks=stacks)


def _named(frame: Frame, cells: Mapping[str, int]) -> Frame:
    number = cells.get(PurePath(frame[0]).name)
    return frame if number is None else (f"In[{number}]", frame[1], frame[2])


def _home(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SnapshotError(f"{path}: there is no such home folder.") from None


def _report(path: str | Path, snapshot: Snapshot, extra: Extra) -> SnapshotReport:
    devices = [saved_device(device, names) for device, names in _devices(snapshot, extra)]
    events = tuple(len(snapshot.trace(number).events) for number in snapshot.devices)
    report = Report(tracked="cuda", devices=tuple(devices), findings=(), unavailable=(), stale=0)
    version = snapshot.sidecar.torch_version
    return SnapshotReport(
        file=Path(path).name,
        torch_version=version,
        settings=_settings(snapshot),
        events=events,
        report=report,
        notes=_notes(snapshot, extra),
    )


def _settings(snapshot: Snapshot) -> str | None:
    return snapshot.settings if snapshot.settings is not None else snapshot.sidecar.settings


def _devices(snapshot: Snapshot, extra: Extra) -> list[tuple[DeviceFacts, Mapping[int, str] | None]]:
    """Return the devices of a snapshot, each with who held which block there; None where no file says so."""
    settings = _settings(snapshot) or ""
    names = [None if extra.names is None else extra.names.get(number, {}) for number in snapshot.devices]
    return [(_facts(snapshot, number, settings), held) for number, held in zip(snapshot.devices, names, strict=True)]


def _notes(snapshot: Snapshot, extra: Extra) -> tuple[str, ...]:
    notes = []
    if extra.is_of_another:
        notes.append("the file beside it is of another snapshot: its names are left out, sizes and version may be wrong")
    if extra.names is None:
        has_stacks = any(block.stack >= 0 for segment in snapshot.segments for block in segment.blocks)
        by = "holders are the lines that allocated" if has_stacks else "and no history was recorded: holders are not known"
        notes.append(f"no names (%gpumem snapshot writes them beside it): {by}")
    if extra.unnamed:
        notes.append(f"{extra.unnamed} small holders had no room in the file beside it")
    return tuple(notes)


def _facts(snapshot: Snapshot, number: int, settings: str) -> DeviceFacts:
    """Return a device of a snapshot as a look at a live one would have it."""
    said = snapshot.sidecar
    total = said.totals[number] if number < len(said.totals) else None
    free = said.frees[number] if number < len(said.frees) else None
    name = said.names[number] if number < len(said.names) else ""
    fraction = said.fractions[number] if number < len(said.fractions) else None
    limit = None if total is None or fraction is None else int(fraction * total)
    segments = tuple(_segment(snapshot, each) for each in snapshot.segments if each.device == number)
    reserved = sum(segment.total_size for segment in segments)
    blocks = (block for segment in segments for block in segment.blocks)
    allocated = sum(block.size for block in blocks if block.state == "active_allocated")
    stats = AllocatorStats(allocated=allocated, reserved=reserved)
    return DeviceFacts(
        device=f"cuda:{number}",
        name=name,
        total=total,
        free=free,
        allocator=stats,
        segments=segments,
        settings=settings,
        limit=limit,
    )


def _segment(snapshot: Snapshot, segment: SnapshotSegment) -> Segment:
    blocks = tuple(
        Block(
            address=block.address,
            size=block.size,
            state=block.state,
            requested=block.requested,
            site=site_of(snapshot.stacks[block.stack]),
        )
        if block.stack >= 0
        else Block(address=block.address, size=block.size, state=block.state, requested=block.requested)
        for block in segment.blocks
    )
    return Segment(
        address=segment.address,
        total_size=segment.total_size,
        is_small=segment.is_small,
        is_expandable=segment.is_expandable,
        blocks=blocks,
        stream=segment.stream,
        pool=segment.pool,
    )


_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "/torch/_", "/torch/nn/", "??")


def site_of(stack: tuple[Frame, ...]) -> str:
    """Return the innermost line of a stack that is no library's, in words: `In[7], line 3 in step()`."""
    own = [frame for frame in stack if frame[1] and not any(part in frame[0] for part in _LIBRARIES)]
    if not (own or stack):
        return ""
    file, line, name = (own or list(stack))[0]
    return line_words(_printable(PurePath(file).name), line, _printable(name))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "�" for char in text[:_LONGEST])


_LONGEST = 200


def _extra(path: Path) -> Extra:
    """Return what stands beside a file and `load_snapshot` has no use for; it has refused what is no such file at all."""
    place = sidecar_path(path)
    if not place.is_file():
        return Extra()
    try:
        raw = json.loads(place.read_text(encoding="utf-8"))
        holders = raw.get("holders")
        names = None if holders is None else _names(holders)
        if raw.get("crc32", found := _checksum(path)) != found:
            return Extra(is_of_another=True)
        cells = {str(file): int(number) for file, number in raw.get("cells", {}).items()}
        return Extra(names, cells, int(raw.get("unnamed", 0)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise SnapshotError(f"{place.name} beside it is damaged; take it away to read the snapshot without it.") from None


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            found = zlib.crc32(part, found)
    return found


def _names(holders: Any) -> dict[int, dict[int, str]]:
    found: dict[int, dict[int, str]] = {}
    for holder in holders:
        label = holder["label"]
        if type(label) is not str:
            raise TypeError
        blocks = found.setdefault(int(holder["device"]), {})
        blocks |= dict.fromkeys(map(int, holder["blocks"]), _printable(label))
    return found
