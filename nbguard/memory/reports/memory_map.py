"""The map of a device's memory, with its segments and blocks, by pool and stream, with their holders and pins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.cleanup.plan.cheapest import Release, cheapest_release
from nbguard.memory.cleanup.plan.parking import block_holders_of, pins_of
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import HolderSource, Segment
from nbguard.memory.core.fragmentation import Fragmentation, free_runs, returnable_part, unit_pages
from nbguard.memory.core.pinning import BlockHolders, HolderPins, Pinner, Unit, pinners, units
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.requests import LargestRequest
from nbguard.render.result import Result

_PINNERS = 200
"""The worst so many segments are explained block by block; the figures by holder count all."""


RELEASABLE, STRANDED, KEPT = -1, -2, -3
"""Stand-ins for a holder where there is none: bytes that emptying the cache gives back, bytes that live blocks keep from going
back, bytes that are free for a graph's pool only."""


@dataclass(frozen=True, slots=True)
class MapBlock:
    """A live block, or a stretch of free bytes: `holder` is a place among the holders of the map, or one of the above."""

    address: int
    size: int
    holder: int


@dataclass(frozen=True, slots=True)
class MapSegment:
    """A segment with its live blocks and free stretches, by address, without gaps."""

    address: int
    size: int
    is_expandable: bool
    blocks: tuple[MapBlock, ...]

    def part(self, holder: int) -> int:
        """Return the bytes of a holder, or those `RELEASABLE`, `STRANDED` or `KEPT`."""
        return sum(block.size for block in self.blocks if block.holder == holder)


@dataclass(frozen=True, slots=True)
class MapPool:
    """The segments of one pool, stream and size class, with its figures."""

    name: str
    space: Fragmentation
    segments: tuple[MapSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapHolder:
    """A holder of blocks."""

    label: str  # the holder's, in notebook terms
    kind: str  # the holder's
    stale: bool  # nothing of the user's own needs it
    nbytes: int  # bytes of its blocks on the device
    source: HolderSource = "python"  # the holder's


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of expandable segments: full of live blocks, partly used, and free."""

    full: int
    partly: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMap:
    """The map of one device. All sizes are bytes."""

    device: str  # name in torch: `cuda:0`
    name: str  # name of the product
    space: Fragmentation  # of all its segments
    pools: tuple[MapPool, ...]  # add up to `space`
    holders: tuple[MapHolder, ...]  # of blocks; a block names its holder by the place among them
    pinners: tuple[Pinner, ...]  # the worst segments
    by_holder: tuple[HolderPins, ...]  # bytes that each holder pins, of all segments
    largest: LargestRequest  # the largest request that would succeed now
    rounding: int | None  # excess of live blocks over their requests, in bytes; None if this torch does not tell
    pages: Pages | None  # of expandable segments; None without any
    release: Release | None = None  # cheapest way to a request of a given size; None if none was given


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMap(Result):
    """The map of `%gpumem map`. Frozen numbers and words: keeping one keeps nothing else alive."""

    kind: ClassVar[str] = "memory_map"
    view: ClassVar[str] = "nbguard.memory.reports.map_view:map_blocks"

    tracked: str  # kind of device whose tensors are tracked
    devices: tuple[DeviceMap, ...]  # those that have segments
    without: tuple[str, ...] = ()  # names of those that have none to show
    why_not: str = ""  # why these have none
    file: str = ""  # snapshot that it was drawn from; empty for this process
    notes: tuple[str, ...] = ()  # sentences on facts that the file lacks

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all devices, mapped or not."""
        return (*(mapped.device for mapped in self.devices), *self.without)

    def only(self, device: str) -> MemoryMap:
        """Return the map of one device, `cuda:0` or `0`."""
        wanted = {device, f"{self.tracked}:{device}"}
        return replace(
            self,
            devices=tuple(mapped for mapped in self.devices if mapped.device in wanted),
            without=tuple(mapped for mapped in self.without if mapped in wanted),
        )


def build_map(analysis: Analysis, request: int | None = None) -> MemoryMap:
    """Return the map of a scan; with `request`, also the cheapest way to a request of so many bytes in one piece."""
    facts, shows = analysis.facts, advice.REPORT.command + " shows"
    mapped = tuple(_device(device, request) for device in analysis.devices if device.facts.segments)
    without = tuple(device.device for device in facts.devices if not device.segments)
    if facts.tracked == "cpu":
        why_not = "No GPU in this process: CPU memory has no segments, so there is no map of it (" + shows + " who holds it)"
    elif all(device.segments is None for device in facts.devices):
        why_not = "PyTorch does not tell the segments of this device (" + shows + " who holds its memory)"
    else:
        why_not = "PyTorch has reserved nothing there"
    return MemoryMap(tracked=facts.tracked, devices=mapped, without=without, why_not=why_not if without else "")


def _device(device: DeviceAnalysis, request: int | None) -> DeviceMap:
    segments, held = device.facts.segments or (), device.once(block_holders_of)
    sizes = [0] * len(held.holders)
    for segment in segments:
        for block in segment.blocks:
            if block.state != "inactive":
                sizes[held.place(block)] += block.size
    return DeviceMap(
        device=device.name,
        name=device.facts.name,
        space=device.space,
        pools=_pools(device, held),
        holders=tuple(
            MapHolder(label=row.label, kind=row.kind, stale=row.stale, nbytes=size, source=row.source)
            for row, size in zip(held.holders, sizes, strict=True)
        ),
        pinners=pinners(device.analysis.facts.graph, device.units, held, _PINNERS),
        by_holder=device.once(pins_of),
        largest=device.largest,
        rounding=rounding_waste(segments),
        pages=page_occupancy(segments, units(segments)),
        release=None if request is None else cheapest_release(device, request),
    )


def _holder(holder: Holder, nbytes: int) -> MapHolder:
    return MapHolder(label=holder.label, kind=holder.kind, stale=holder.stale, nbytes=nbytes, source=holder.source)


def _pools(device: DeviceAnalysis, held: BlockHolders) -> tuple[MapPool, ...]:
    in_use = device.analysis.pools_in_use
    groups: dict[tuple[tuple[int, int], int, bool], list[Segment]] = {}
    for segment in sorted(device.facts.segments or (), key=lambda segment: segment.address):
        groups.setdefault((segment.pool, segment.stream, not segment.is_small), []).append(segment)
    return tuple(
        MapPool(pool.name, pool.space, tuple(_segment(segment, held, segment.pool in in_use) for segment in groups[key]))
        for pool, key in zip(device.pools, sorted(groups), strict=True)
    )


def _segment(segment: Segment, held: BlockHolders, is_kept: bool) -> MapSegment:
    blocks = [MapBlock(block.address, block.size, held.place(block)) for block in segment.blocks if block.state != "inactive"]
    for start, size in free_runs(segment):
        if is_kept:
            blocks.append(MapBlock(start, size, KEPT))
            continue
        at, back = returnable_part(segment, start, size)
        at = at if back else start + size
        parts = ((start, at - start, STRANDED), (at, back, RELEASABLE), (at + back, start + size - at - back, STRANDED))
        blocks += [MapBlock(*part) for part in parts if part[1]]
    blocks.sort(key=lambda block: block.address)
    return MapSegment(segment.address, segment.total_size, segment.is_expandable, tuple(blocks))


def rounding_waste(segments: Iterable[Segment]) -> int | None:
    """Return by how many bytes live blocks are larger than requested; None where that is not known of any."""
    live = [block for segment in segments for block in segment.blocks if block.state == "active_allocated" and block.requested]
    return sum(block.size - block.requested for block in live) if live else None


def page_occupancy(segments: Iterable[Segment], occupied: Iterable[Unit]) -> Pages | None:
    """Return how full the pages of the expandable segments are; None where there are none. `found` are their `units`."""
    total = sum(segment.total_size // unit_pages(segment) for segment in segments if segment.is_expandable)
    if not total:
        return None
    full = partly = 0
    for unit in occupied:
        if unit.segment.is_expandable:
            page = unit_pages(unit.segment)
            filled = _full_pages(unit, page)
            full += filled
            partly += -(-unit.size // page) - filled
    return Pages(full, partly, max(0, total - full - partly))


def _full_pages(unit: Unit, page: int) -> int:
    """Return how many pages of a unit have no free byte."""
    live = [0] * -(-unit.size // page)
    for block in unit.live:
        at, end = block.address - unit.address, block.address - unit.address + block.size
        while at < end:
            number = at // page
            step = min(end, (number + 1) * page) - at
            live[number] += step
            at += step
    return sum(nbytes == page for nbytes in live)
