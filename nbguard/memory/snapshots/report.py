"""The report on a snapshot file, its map, and the difference of two files, as plain data in figures that add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from nbguard.memory.allocator.snapshot.snapshot import Snapshot
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis, parts_of
from nbguard.memory.core.facts import Block, DeviceFacts, Facts, Graph, HolderSource, Node, PoolFact, Root, Segment, StorageFact
from nbguard.memory.core.fragmentation import PoolKey, by_pool
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.requests import Pool
from nbguard.memory.reports.memory_map import MemoryMap, build_map
from nbguard.memory.reports.report import DeviceReport, Report
from nbguard.memory.snapshots.load import HolderNames, NotebookNames, Progress, device_facts, load_named, settings_of
from nbguard.render.result import Result
from nbguard.units import counted

_NOT_PYTHONS = "not held by Python"
UNKNOWN = "unknown"
_PRIVATE = "CUDA graphs and MemPools"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport(Result):
    """The report on one snapshot file."""

    kind: ClassVar[str] = "saved"
    view: ClassVar[str] = "nbguard.memory.snapshots.diagnosis:saved_blocks"

    file: str  # name of the file, without its folder
    torch_version: str | None  # that wrote it, from the sidecar; None if unknown
    settings: str | None  # of the allocator, as in `PYTORCH_ALLOC_CONF`; "": defaults; None if unknown
    events: tuple[int, ...]  # entries of the history (`device_traces`), by device
    report: Report  # in the columns of `%gpumem`
    notes: tuple[str, ...] = ()  # sentences on facts that the file lacks


def snapshot_report(path: str | Path, progress: Progress | None = None) -> SnapshotReport:
    """Return the report on a snapshot file: on each device the holders of memory and the allocator's pools.

    Holders are names where nbguard wrote the file, else the lines that allocated, where a history was recorded.

    Raises:
        SnapshotError: the file, or the one beside it, cannot be read.
    """
    return report_of(path, *load_named(path, progress))


def snapshot_map(path: str | Path, progress: Progress | None = None) -> MemoryMap:
    """Return the map of a snapshot file: segments and blocks, the holders of each, and the blocks that pin free memory.

    Raises:
        SnapshotError: the file, or the one beside it, cannot be read.
    """
    return map_of(path, *load_named(path, progress))


def map_of(path: str | Path, snapshot: Snapshot, names: NotebookNames) -> MemoryMap:
    """Return the map of a snapshot that was loaded from `path`."""
    return saved_map(Path(path).name, _devices(snapshot, names), notes_of(snapshot, names))


def report_of(path: str | Path, snapshot: Snapshot, names: NotebookNames) -> SnapshotReport:
    """Return the report on a snapshot that was loaded from `path`."""
    return reported(Path(path).name, snapshot, _devices(snapshot, names), notes_of(snapshot, names))


def reported(
    file: str, snapshot: Snapshot, devices: Iterable[tuple[DeviceFacts, HolderNames | None]], notes: tuple[str, ...]
) -> SnapshotReport:
    """Return the report on devices of a snapshot, each with the names of its blocks' holders."""
    saved = tuple(saved_device(device, holders) for device, holders in devices)
    return SnapshotReport(
        file=file,
        torch_version=snapshot.sidecar.torch_version,
        settings=settings_of(snapshot),
        events=tuple(len(snapshot.trace(number).events) for number in snapshot.devices),
        report=Report(tracked="cuda", devices=saved, findings=(), unavailable=(), stale=0),
        notes=notes,
    )


def _devices(snapshot: Snapshot, names: NotebookNames) -> list[tuple[DeviceFacts, HolderNames | None]]:
    """Return the devices of a snapshot, each with the names of its blocks' holders; None where the sidecar has no names."""
    return [
        (device_facts(snapshot, number), None if names.holders is None else names.holders.get(number, {}))
        for number in snapshot.devices
    ]


def notes_of(snapshot: Snapshot, names: NotebookNames) -> tuple[str, ...]:
    """Return sentences on facts that a file and the one beside it lack."""
    notes = []
    if names.is_of_another:
        notes.append(
            "the file next to it belongs to another snapshot, so its names are left out; sizes and version may be wrong"
        )
    if names.holders is None:
        has_stacks = any(block.stack >= 0 for segment in snapshot.segments for block in segment.blocks)
        by = "holders are the lines that allocated" if has_stacks else "holders are not known, as no stacks were recorded"
        notes.append("no names (" + advice.SNAPSHOT.command + f" writes them next to it): {by}")
    if names.unnamed:
        notes.append(f"{names.unnamed} small holders had no room in the file next to it")
    return tuple(notes)


def saved_device(device: DeviceFacts, names: HolderNames | None) -> DeviceReport:
    """Return the report on one device of a file.

    Args:
        device: with its segments; the `site` of a block is the line that allocated it.
        names: the holders by address of their blocks, from a sidecar; None where no sidecar has them.
    """
    segments = device.segments or ()
    holders = tuple(_holders(segments, names))
    allocated = sum(holder.retained for holder in holders)
    private = frozenset(segment.pool for segment in segments if segment.is_private)
    pools = tuple(Pool(_pool_name(key), space) for key, space in by_pool(segments, in_use=private).items())
    blocks = sum(block.state == "active_allocated" for segment in segments for block in segment.blocks)
    parts = parts_of(device, allocated, -1, private)
    return DeviceReport(
        device=device.device,
        name=device.name,
        total=device.total,
        allocated=allocated,
        parts=parts,
        holders=holders,
        storages=blocks,
        pools=pools,
    )


def _holders(segments: Iterable[Segment], names: HolderNames | None) -> list[Holder]:
    rows: dict[str, tuple[list[int], dict[str, int]]] = {}
    for block, label, site, _ in _held_blocks(segments, names):
        sizes, sites = rows.setdefault(label, ([], {}))
        sizes.append(block.size)
        if site:
            sites[site] = sites.get(site, 0) + block.size
    return sorted((_holder(label, *row) for label, row in rows.items()), key=lambda row: (-row.retained, row.label))


def _held_blocks(segments: Iterable[Segment], names: HolderNames | None) -> Iterator[tuple[Block, str, str, HolderSource]]:
    """Yield (allocated block, its holder, the line that allocated a block whose holder is a name, the holder's source)."""
    for segment in segments:
        for block in segment.blocks:
            if block.state == "active_allocated":
                site = f"allocated at {block.site}" if block.site else ""
                named = None if names is None else names.get(block.address)
                if named:
                    yield block, named, site, "python"
                elif site:
                    yield block, site, "", "site"
                elif segment.is_private:
                    yield block, _PRIVATE, "", "graphs"
                else:
                    yield block, *((UNKNOWN, "", "unrecorded") if names is None else (_NOT_PYTHONS, "", "unknown"))


def saved_map(file: str, devices: Sequence[tuple[DeviceFacts, HolderNames | None]], notes: tuple[str, ...]) -> MemoryMap:
    """Return the map of the devices of a file, from a graph with the holders that `saved_device` reports."""
    storages: list[StorageFact] = []
    holds: dict[tuple[str, HolderSource], list[int]] = {}
    for device, names in devices:
        for block, label, _, source in _held_blocks(device.segments or (), names):
            holds.setdefault((label, source), []).append(len(storages))
            storages.append(StorageFact(device.device, block.size, block.address))
    roots = tuple(
        Root(kind="library", label=label, nodes=(number,), source=source) for number, (label, source) in enumerate(holds)
    )
    nodes = [Node(kind="data", type_name="", ref=number, storages=tuple(held)) for number, held in enumerate(holds.values())]
    private = sorted({segment.pool for device, _ in devices for segment in device.segments or () if segment.is_private})
    pools = tuple(PoolFact(pool=pool, keepers=(number,)) for number, pool in enumerate(private, start=len(nodes)))
    nodes += [Node(kind="pool", type_name=f"private pool {fact.pool[0]}.{fact.pool[1]}", ref=fact.keepers[0]) for fact in pools]
    facts = Facts(
        tracked="cuda",
        devices=tuple(device for device, _ in devices),
        graph=Graph(roots, tuple(nodes), tuple(storages)),
        pools=pools,
    )
    return replace(build_map(Analysis(facts)), file=file, notes=notes)


def _holder(label: str, sizes: Sequence[int], sites: Mapping[str, int]) -> Holder:
    blocks = counted(len(sizes), "block")
    most = max(sites, key=sites.__getitem__, default="")
    mostly = "" if not most else f", {'mostly ' if len(sites) > 1 else ''}{most}"
    return Holder(
        label=label,
        kind="saved",
        retained=sum(sizes),
        reaches=sum(sizes),
        cell=None,
        what=blocks + mostly,
        stale=False,
        roots=(),
    )


def _pool_name(key: PoolKey) -> str:
    words = ["small blocks" if key.is_small else "large blocks"]
    if key.pool != (0, 0):
        words.insert(0, f"private pool {key.pool[0]}.{key.pool[1]}")
    if key.stream:
        words.append(f"stream {key.stream:#x}")
    return " · ".join(words)


# --- The difference of two snapshot files, that is, bytes that came and went, by holder and by pool, in figures that add up.


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
    view: ClassVar[str] = "nbguard.memory.snapshots.diagnosis:diff_blocks"

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
    first_names, second_names, notes = comparable((before, first_names), (after, second_names))
    return difference(report_of(before, first, first_names), report_of(after, second, second_names), notes)


def comparable(
    before: tuple[str | Path, NotebookNames], after: tuple[str | Path, NotebookNames]
) -> tuple[NotebookNames, NotebookNames, tuple[str, ...]]:
    """Return the names of two files without their holders where one has none, and the sentence that says so."""
    (path, first), (_, second) = before, after
    if (first.holders is None) == (second.holders is None):
        return first, second, ()
    without = Path(path if first.holders is None else after[0]).name
    note = f"{without} has no names file next to it, so both are compared by their allocating lines"
    return replace(first, holders=None), replace(second, holders=None), (note,)


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
