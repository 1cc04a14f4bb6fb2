"""What a memory snapshot in a file says of each device, and what grew between two: plain data that re-adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nbguard.memory.breakdown import parts_of
from nbguard.memory.facts import Block, DeviceFacts, Facts, Graph, Node, PoolFact, Root, Segment, StorageFact
from nbguard.memory.fragmentation import PoolKey, by_pool
from nbguard.memory.graph import Holder
from nbguard.memory.pools import Pool
from nbguard.reports.memory_map import MemoryMap, build_map
from nbguard.reports.report import DeviceReport, Report

NOT_PYTHONS = "not held by Python"
UNKNOWN = "unknown"
_PRIVATE = "CUDA graphs and MemPools"

Names = Mapping[int, str]
"""Who held the block at an address when the file was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReport:
    """One snapshot file: its report, in the columns of `%gpumem`, and what it knows of its origin.

    `settings` are those of the allocator (empty: defaults); `events` are entries of the history by device; `notes` say
    what the file lacks.
    """

    file: str
    torch_version: str | None
    settings: str | None
    events: tuple[int, ...]
    report: Report
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeChange:
    """Bytes of one holder or pool in the first file and the second; `grown` is the difference."""

    label: str
    before: int
    after: int
    grown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDiff:
    """What changed on one device. `holders` re-add to `allocated`, `pools` to `reserved`; unchanged rows are left out."""

    device: str
    allocated: SizeChange
    reserved: SizeChange
    holders: tuple[SizeChange, ...]
    pools: tuple[SizeChange, ...]


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """What changed from one snapshot file to another, by device."""

    before: str
    after: str
    devices: tuple[DeviceDiff, ...]
    notes: tuple[str, ...] = ()


def saved_device(device: DeviceFacts, names: Names | None) -> DeviceReport:
    """Return the report on one device of a file.

    Args:
        device: with its segments; blocks that have a `site` were allocated there.
        names: who held which block, where a sidecar tells; None where none does.
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


def _holders(segments: Iterable[Segment], names: Names | None) -> list[Holder]:
    found: dict[tuple[str, str], list[int]] = {}
    for block, label, site in _held(segments, names):
        found.setdefault((label, site), []).append(block.size)
    rows: dict[str, tuple[list[int], dict[str, int]]] = {}
    for (label, site), sizes in found.items():
        held, sites = rows.setdefault(label, ([], {}))
        held += sizes
        if site:
            sites[site] = sites.get(site, 0) + sum(sizes)
    return sorted((_row(label, *row) for label, row in rows.items()), key=lambda row: (-row.retained, row.label))


def _held(segments: Iterable[Segment], names: Names | None) -> Iterator[tuple[Block, str, str]]:
    """Yield each allocated block, who held it, and where a named one was allocated."""
    for segment in segments:
        for block in segment.blocks:
            if block.state == "active_allocated":
                site = f"allocated at {block.site}" if block.site else ""
                named = None if names is None else names.get(block.address)
                otherwise = _PRIVATE if segment.is_private else UNKNOWN if names is None else NOT_PYTHONS
                yield block, named or site or otherwise, site if named else ""


def saved_map(file: str, found: Sequence[tuple[DeviceFacts, Names | None]], notes: tuple[str, ...]) -> MemoryMap:
    """Return the map of the devices of a file: a graph in which each block is held by whoever `saved_device` says."""
    storages: list[StorageFact] = []
    holds: dict[str, list[int]] = {}
    for device, names in found:
        for block, label, _ in _held(device.segments or (), names):
            holds.setdefault(label, []).append(len(storages))
            storages.append(StorageFact(device.device, block.size, block.address))
    roots = tuple(Root(kind="library", label=label, nodes=(number,)) for number, label in enumerate(holds))
    nodes = [Node(kind="data", type_name="", ref=number, storages=tuple(each)) for number, each in enumerate(holds.values())]
    private = sorted({segment.pool for device, _ in found for segment in device.segments or () if segment.is_private})
    pools = tuple(PoolFact(pool, (number,)) for number, pool in enumerate(private, start=len(nodes)))
    nodes += [Node(kind="pool", type_name=f"private pool {fact.pool[0]}.{fact.pool[1]}", ref=fact.keepers[0]) for fact in pools]
    facts = Facts(
        tracked="cuda",
        devices=tuple(device for device, _ in found),
        graph=Graph(roots, tuple(nodes), tuple(storages)),
        pools=pools,
    )
    return replace(build_map(facts), file=file, notes=notes)


def _row(label: str, sizes: Sequence[int], sites: Mapping[str, int]) -> Holder:
    blocks = f"{len(sizes)} block" + ("s" if len(sizes) != 1 else "")
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


def difference(before: SnapshotReport, after: SnapshotReport, notes: tuple[str, ...] = ()) -> SnapshotDiff:
    """Return what changed from `before` to `after`."""
    first, second = ({device.device: device for device in each.report.devices} for each in (before, after))
    devices = tuple(_device(name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
    return SnapshotDiff(before.file, after.file, devices, notes)


def _device(name: str, before: DeviceReport | None, after: DeviceReport | None) -> DeviceDiff:
    holders = [{row.label: row.retained for row in each.holders} if each is not None else {} for each in (before, after)]
    pools = [{pool.name: pool.space.reserved for pool in each.pools} if each is not None else {} for each in (before, after)]
    return DeviceDiff(
        device=name,
        allocated=_change("allocated", *(sum(each.values()) for each in holders)),
        reserved=_change("reserved", *(sum(each.values()) for each in pools)),
        holders=_changes(*holders),
        pools=_changes(*pools),
    )


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[SizeChange, ...]:
    labels = [label for label in dict.fromkeys((*after, *before)) if before.get(label, 0) != after.get(label, 0)]
    rows = (_change(label, before.get(label, 0), after.get(label, 0)) for label in labels)
    return tuple(sorted(rows, key=lambda row: (-abs(row.grown), row.label)))


def _change(label: str, before: int, after: int) -> SizeChange:
    return SizeChange(label, before, after, after - before)
