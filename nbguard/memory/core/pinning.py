"""Pins, the live blocks that keep free memory from going back to the device, by their holders.

PyTorch gives back whole segments, of an expandable one whole pages. So one tensor of 512 bytes keeps 20 MiB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.memory.core.facts import Block, DeviceFacts, Facts, Graph, HolderSource, PoolId, Segment
from nbguard.memory.core.fragmentation import unit_pages
from nbguard.memory.core.references.graph import path_text, shortest_paths
from nbguard.memory.core.references.holders import CHANGED, Holder, Holding, after_cleanup, unheld_blocks, unheld_row

_PENDING = replace(unheld_row("waiting for a stream", 0, "freed, and used by another stream", "pending"), kind="pending")
_CHANGED = unheld_row(CHANGED, 0, "run it again", "changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Memory that goes back to the device as one: a segment, or pages of an expandable one that live blocks join."""

    segment: Segment  # that it lies in
    address: int  # on the device
    size: int  # bytes
    live: tuple[Block, ...]  # its blocks that are not free
    gives_back: int  # bytes that `empty_cache` returns once they are free

    @property
    def stranded(self) -> int:
        """Bytes that are free in it."""
        return self.size - sum(block.size for block in self.live)


def units(segments: Iterable[Segment], in_use: Collection[PoolId] = ()) -> Iterator[Unit]:
    """Yield every unit that has a live block, but no unit of the private pools `in_use`, which give nothing back.

    Their `stranded` bytes add up to `fragmentation`'s; the `gives_back` of each does not depend on the others.
    """
    for segment in segments:
        if segment.pool not in in_use:
            yield from _units(segment)


def _units(segment: Segment) -> Iterator[Unit]:
    page = unit_pages(segment)
    live: list[Block] = []
    first = last = 0
    for block in segment.blocks:
        if block.state == "inactive":
            continue
        if not segment.is_expandable:
            live.append(block)
            continue
        start, end = ((at - segment.address) // page for at in (block.address, block.address + block.size - 1))
        if live and start > last:
            yield _unit(segment, page, first, last, live)
            live = []
        first = first if live else start
        last = end
        live.append(block)
    if live:
        yield _unit(segment, page, first, last, live)


def _unit(segment: Segment, page: int, first: int, last: int, live: Sequence[Block]) -> Unit:
    end = min((last + 1) * page, segment.total_size)
    return Unit(
        segment=segment,
        address=segment.address + first * page,
        size=end - first * page,
        live=tuple(live),
        gives_back=(end // page - first) * page,
    )


@dataclass(frozen=True, slots=True)
class BlockHolders:
    """The holders of the blocks of a device, and which of the blocks a cleanup would free."""

    holders: tuple[Holder, ...]
    by_address: Mapping[int, int]  # place of each block's holder among them
    storages: Mapping[int, int]  # number of the storage at an address
    freed: Set[int] = frozenset()  # numbers of the storages that the cleanup frees

    @classmethod
    def of(cls, facts: Facts, device: DeviceFacts, held: Iterable[Holding], freed: Set[int]) -> BlockHolders:
        """Return the holders of `device`; `held` and `freed` as in `all_holders`."""
        rows: list[Holder] = []
        graph = facts.graph
        places: dict[int, int] = {}
        numbers = {s.address: n for n, s in enumerate(graph.storages) if s.device == device.device}
        for row, storages in held:
            places |= dict.fromkeys((graph.storages[number].address for number in storages), len(rows))
            rows.append(after_cleanup(graph, (row, storages), freed))
        for row, blocks in unheld_blocks(facts, device):
            places |= dict.fromkeys((block.address for block in blocks), len(rows))
            rows.append(row)
        return cls((*rows, _PENDING, _CHANGED), places, numbers, freed)

    def is_stale(self, block: Block) -> bool:
        """Say whether the cleanup frees a block: of a holder that stays, too."""
        return self.storages.get(block.address) in self.freed

    def place(self, block: Block) -> int:
        """Return the place of a live block's holder among `holders`."""
        if block.state == "active_pending_free":
            return len(self.holders) - 2
        return self.by_address.get(block.address, len(self.holders) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedBlock:
    """A live block that keeps free memory from going back."""

    address: int  # on the device
    size: int  # bytes
    requested: int  # bytes asked for, before rounding; 0 where this torch does not tell
    holder: str  # the holder's label
    path: str  # the way to it, as one would write it; empty where Python has none
    stale: bool = False  # the holder is stale
    source: HolderSource = "python"  # the holder's


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinner:
    """A segment, or pages of an expandable one, that live blocks keep from going back to the device."""

    address: int  # on the device
    size: int  # bytes
    pool: PoolId  # of its segment
    stream: int  # of its segment
    is_small: bool  # of its segment
    is_expandable: bool  # of its segment
    stranded: int  # bytes that are free in it
    gives_back: int  # bytes that go back to the device once all its blocks are free
    blocks: tuple[PinnedBlock, ...]  # its live blocks

    @property
    def pinned_by(self) -> int:
        """Bytes of the live blocks."""
        return sum(block.size for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderPins:
    """The free memory of a device that one holder keeps from going back. All sizes are bytes."""

    label: str  # the holder's
    kind: str  # the holder's
    stale: bool  # the holder is stale
    blocks: int  # number of its live blocks (tensors) in segments with stranded bytes
    nbytes: int  # bytes of these blocks
    segments: int  # number of these segments, or stretches of pages
    stranded: int  # free bytes in them
    stranded_alone: int  # free bytes in those of them with its blocks alone
    gives_back: int  # bytes that go back to the device when this holder alone is released
    example: str = ""  # one of its blocks there, as one would write it: `losses[3]`
    names: tuple[str, ...] = ()  # the holder's: every name of the object, all of which must go
    stale_blocks: int = 0  # number of `blocks` that the default cleanup frees


def pinners(graph: Graph, occupied: Sequence[Unit], held: BlockHolders, limit: int) -> tuple[Pinner, ...]:
    """Return the worst units, at most `limit`: the highest ratio of free bytes to live ones first.

    Half of the places are for the units with the most free bytes, however many of theirs are live.
    """
    stranding = [unit for unit in occupied if unit.stranded > 0]
    worst = sorted(stranding, key=lambda unit: (-unit.stranded / (unit.size - unit.stranded), unit.address))
    if len(worst) > limit:
        most = sorted(stranding, key=lambda unit: (-unit.stranded, unit.address))[: limit // 2]
        chosen = {unit.address for unit in most}
        for unit in worst:
            if len(chosen) < limit:
                chosen.add(unit.address)
        worst = [unit for unit in worst if unit.address in chosen]
    paths = paths_to(graph, [block for unit in worst for block in unit.live], held)
    return tuple(_pinner(unit, held, paths) for unit in worst)


def _pinner(unit: Unit, held: BlockHolders, paths: Mapping[int, str]) -> Pinner:
    segment = unit.segment
    blocks = tuple(
        PinnedBlock(
            address=block.address,
            size=block.size,
            requested=block.requested,
            holder=holder.label,
            path=paths.get(block.address, ""),
            stale=holder.stale,
            source=holder.source,
        )
        for block, holder in ((block, held.holders[held.place(block)]) for block in unit.live)
    )
    return Pinner(
        address=unit.address,
        size=unit.size,
        pool=segment.pool,
        stream=segment.stream,
        is_small=segment.is_small,
        is_expandable=segment.is_expandable,
        stranded=unit.stranded,
        gives_back=unit.gives_back,
        blocks=blocks,
    )


def paths_to(graph: Graph, blocks: Iterable[Block], held: BlockHolders) -> dict[int, str]:
    """Return, by address, the way to the holder of each block as one would write it: `losses[3]`; one search per holder."""
    wanted: dict[int, dict[int, int]] = {}
    for block in blocks:
        place, storage = held.place(block), held.storages.get(block.address)
        if storage is not None and held.holders[place].roots:
            wanted.setdefault(place, {})[storage] = block.address
    nodes: dict[int, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for storage in node.storages:
            nodes.setdefault(storage, []).append(number)
    texts: dict[int, str] = {}
    for place, storages in wanted.items():
        root = graph.roots[held.holders[place].roots[0]]
        goals: dict[int, list[int]] = {}
        for storage, address in storages.items():
            for holding in nodes.get(storage, ()):
                goals.setdefault(holding, []).append(address)
        for end, path in shortest_paths(graph, root, goals).items():
            text = path_text(graph, root, path, shorten=6)
            for address in goals[end]:
                texts[address] = min(texts.get(address, text), text, key=len)
    return texts


def pins_of_holders(graph: Graph, occupied: Sequence[Unit], held: BlockHolders) -> tuple[HolderPins, ...]:
    """Return the bytes that each holder pins; first the holder that gives most back when it alone is released."""
    owners = [(unit, frozenset(map(held.place, unit.live))) for unit in occupied]
    examples: dict[int, tuple[int, Block]] = {}
    touched: dict[int, list[Unit]] = {}
    for unit, places in owners:
        for place in places if unit.stranded > 0 else ():
            touched.setdefault(place, []).append(unit)
            if unit.stranded > examples.get(place, (0, None))[0]:
                examples[place] = unit.stranded, next(block for block in unit.live if held.place(block) == place)
    paths = paths_to(graph, [block for _, block in examples.values()], held)
    by_owners: dict[Set[int], list[Unit]] = {}
    for unit, places in owners:
        by_owners.setdefault(places, []).append(unit)
    rows = []
    for place, mine in touched.items():
        gone = _goes_with(held, place)
        sets = [gone] if len(gone) == 1 else [places for places in by_owners if places <= gone]
        alone = [unit for places in sets for unit in by_owners.get(places, ())]
        example = paths.get(examples[place][1].address, "")
        rows.append(_pins(held, place, mine, alone, example))
    return tuple(sorted(rows, key=lambda row: (-row.stranded_alone, -row.stranded, row.label)))


def _pins(held: BlockHolders, place: int, touched: Sequence[Unit], alone: Sequence[Unit], example: str) -> HolderPins:
    holder = held.holders[place]
    blocks = [block for unit in touched for block in unit.live if held.place(block) == place]
    return HolderPins(
        label=holder.label,
        kind=holder.kind,
        stale=holder.stale,
        blocks=len(blocks),
        nbytes=sum(block.size for block in blocks),
        segments=len(touched),
        stranded=sum(unit.stranded for unit in touched),
        stranded_alone=sum(unit.stranded for unit in alone),
        gives_back=sum(unit.gives_back for unit in alone),
        example=example,
        names=holder.names,
        stale_blocks=sum(map(held.is_stale, blocks)),
    )


def _goes_with(held: BlockHolders, place: int) -> frozenset[int]:
    """Return the places of the holders that are freed when one is released; with a shared one, those of each of its names."""
    roots = set(held.holders[place].roots)
    if not held.holders[place].is_shared:
        return frozenset({place})
    return frozenset(n for n, other in enumerate(held.holders) if other.roots and roots.issuperset(other.roots))
