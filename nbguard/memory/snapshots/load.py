"""Snapshot files with the names of the notebook, holders and cells from nbguard's sidecar."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from nbguard.errors import SnapshotError
from nbguard.files import read_file
from nbguard.memory.allocator.snapshot.read import LARGEST_SIDECAR, load_snapshot, sidecar_path
from nbguard.memory.allocator.snapshot.snapshot import Frame, Snapshot, SnapshotSegment
from nbguard.memory.core.facts import AllocatorStats, Block, DeviceFacts, Segment
from nbguard.plain_data import read_json
from nbguard.render.markup import clean, line_words

Progress = Callable[[int, int], None]
"""Called while a file is read, with (bytes done, bytes in all)."""

HolderNames = Mapping[int, str]
"""The holder of each block when the file was written, by the block's address."""

_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen", "/torch/_", "/torch/nn/", "??")
_LONGEST = 200
"""Characters of a name from a file; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class NotebookNames:
    """Names of the notebook from a sidecar, that have no place in PyTorch's format."""

    holders: Mapping[int, HolderNames] | None = None  # by device, from the sidecar's "holders"; None if it has none
    cells: Mapping[str, int] | None = None  # number of the cell by the file IPython compiled it as, without its folder
    unnamed: int = 0  # holders that had no room in the sidecar
    is_of_another: bool = False  # the sidecar's "crc32" is of another file: its names are left out


def load_named(path: str | Path, progress: Progress | None = None) -> tuple[Snapshot, NotebookNames]:
    """Return a snapshot whose stacks call a cell's file `In[7]`, and the names from its sidecar.

    Raises:
        SnapshotError: the file, or its sidecar, cannot be read.
    """
    path = _expanded(path)
    snapshot = load_snapshot(path, progress)
    names = _names_of(path)
    return (with_cell_names(snapshot, names.cells) if names.cells else snapshot), names


def with_cell_names(snapshot: Snapshot, cells: Mapping[str, int]) -> Snapshot:
    """Return a snapshot whose stacks call the files of IPython's compiled cells by the cells, e.g. `In[7]`."""
    return replace(snapshot, stacks=snapshot.stacks.with_frames(lambda frame: _with_cell_name(frame, cells)))


def _with_cell_name(frame: Frame, cells: Mapping[str, int]) -> Frame:
    number = cells.get(PurePath(frame[0]).name)
    return frame if number is None else (f"In[{number}]", frame[1], frame[2])


def _expanded(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SnapshotError(f"{path}: there is no such home folder.") from None


# --- devices ----------------------------------------------------------------------------------------------------------------


def settings_of(snapshot: Snapshot) -> str | None:
    """Return the allocator's settings at the time of the snapshot; None if neither the file nor its sidecar has them."""
    return snapshot.settings if snapshot.settings is not None else snapshot.sidecar.settings


def device_facts(snapshot: Snapshot, number: int) -> DeviceFacts:
    """Return the facts on one device of a snapshot, in the form of a live device's facts."""
    sidecar = snapshot.sidecar
    total = sidecar.totals[number] if number < len(sidecar.totals) else None
    fraction = sidecar.fractions[number] if number < len(sidecar.fractions) else None
    segments = tuple(_segment(snapshot, segment) for segment in snapshot.segments if segment.device == number)
    blocks = (block for segment in segments for block in segment.blocks)
    return DeviceFacts(
        device=f"cuda:{number}",
        name=sidecar.names[number] if number < len(sidecar.names) else "",
        total=total,
        free=sidecar.frees[number] if number < len(sidecar.frees) else None,
        allocator=AllocatorStats(
            allocated=sum(block.size for block in blocks if block.state == "active_allocated"),
            reserved=sum(segment.total_size for segment in segments),
        ),
        segments=segments,
        settings=settings_of(snapshot) or "",
        limit=None if total is None or fraction is None else int(fraction * total),
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


def site_of(stack: tuple[Frame, ...]) -> str:
    """Return the innermost line of a stack that is no library's, in words: `In[7], line 3 in step()`."""
    own = [frame for frame in stack if frame[1] and not any(part in frame[0] for part in _LIBRARIES)]
    if not (own or stack):
        return ""
    file, line, name = (own or list(stack))[0]
    return line_words(clean(PurePath(file).name, _LONGEST), line, clean(name, _LONGEST))


# --- the sidecar's names ----------------------------------------------------------------------------------------------------


def _names_of(path: Path) -> NotebookNames:
    """Return the names in a file's sidecar, whose other content `load_snapshot` has read and checked."""
    place = sidecar_path(path)
    try:
        raw = read_json(read_file(place, LARGEST_SIDECAR))
        holders = None if raw.get("holders") is None else _holder_names(raw["holders"])
        if raw.get("crc32", checksum := _checksum(path)) != checksum:
            return NotebookNames(is_of_another=True)
        cells = {str(file): int(number) for file, number in raw.get("cells", {}).items()}
        return NotebookNames(holders, cells, int(raw.get("unnamed", 0)))
    except FileNotFoundError:
        return NotebookNames()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise SnapshotError(f"{place.name} next to it is damaged; remove it to read the snapshot without it.") from None


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _holder_names(holders: Any) -> dict[int, dict[int, str]]:
    names: dict[int, dict[int, str]] = {}
    for holder in holders:
        label = holder["label"]
        if type(label) is not str:
            raise TypeError
        blocks = names.setdefault(int(holder["device"]), {})
        blocks |= dict.fromkeys(map(int, holder["blocks"]), clean(label, _LONGEST))
    return names
