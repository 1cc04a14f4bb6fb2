"""The rows of the map, for text and picture alike, with a line per segment, similar ones together where there are many."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from nbguard.memory.core.facts import HolderSource
from nbguard.memory.core.segments.pinning import Pinner
from nbguard.memory.reports.memory_map import KEPT, RELEASABLE, STRANDED, DeviceMap, MapHolder, MapPool, MapSegment
from nbguard.units import format_bytes

OTHERS = "other holders"
WORDS = {RELEASABLE: "releasable", STRANDED: "stranded", KEPT: "free for a graph"}
NAMED = 6
"""So many holders have a colour of their own, the largest."""
_MARKS = 8
"""Marks on a row; more would hide it."""


class _State(Enum):
    """The state of a segment: in a few words, and as the note on its row."""

    PARTLY_KEPT = "of a graph, partly free", "of a graph, partly free"
    KEPT = "free for their graph only", "free for their graph only"
    PINNED = "pinned", ""  # the note names the holders
    FULL = "full", "full"
    FREE = "free", "free: emptying the cache gives it back"
    PAGES_FREE = "whole pages are free", "whole pages are free"

    def __init__(self, words: str, note: str) -> None:
        self.words = words
        self.note = note


@dataclass(frozen=True, slots=True)
class RowPiece:
    """A stretch of a row."""

    nbytes: int  # from its start to its end
    paint: str  # a holder's place as text, or one of the words above
    title: str  # shown where the mouse rests


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRow:
    """One segment, or several similar ones added up."""

    count: int  # of segments
    nbytes: int  # of all of them
    pieces: tuple[RowPiece, ...]  # by address; of several segments, and of many pieces, one for each paint
    note: str  # the holders that pin it, or its state
    marks: tuple[int, ...] = ()  # bytes from its start to each block that pins it
    is_summed: bool = False  # whether the pieces are added up

    @property
    def size(self) -> str:
        """Return the bytes of one segment in words; of several, their number and the average."""
        if self.count == 1:
            return format_bytes(self.nbytes)
        return f"{self.count} × {'' if self.is_even else '≈ '}{format_bytes(self.nbytes // self.count)}"

    @property
    def is_even(self) -> bool:
        """Say whether the average is a size that they can all have."""
        return not self.nbytes % (self.count * 512)


@dataclass(frozen=True, slots=True)
class Paints:
    """The colours of a device: some holders have one of their own."""

    named: tuple[int, ...]  # places of the holders with a colour of their own, the largest first
    holders: Sequence[MapHolder]  # all of the device

    @classmethod
    def of(cls, device: DeviceMap) -> Paints:
        """Return the paints of a device: the largest holders have colours."""
        order = sorted(range(len(device.holders)), key=lambda place: -device.holders[place].nbytes)
        return cls(tuple(place for place in order[:NAMED] if device.holders[place].nbytes), device.holders)

    def of_block(self, holder: int) -> str:
        """Return the paint of a holder's blocks."""
        return WORDS.get(holder) or (str(holder) if holder in self.named else OTHERS)

    def label(self, paint: str) -> str:
        """Return a paint in words."""
        return self.holders[int(paint)].label if paint.isdigit() else paint


def rows_of(device: DeviceMap, pool: MapPool, limit: int, pieces: int) -> list[MapRow]:
    """Return at most about `limit` rows of a pool, each of at most `pieces` pieces; together they are all its segments.

    Segments with most stranded stand alone, in the order of their addresses; the rest are added up by state and size.
    """
    paints, pins = Paints.of(device), _pins_by_segment(device)
    if len(pool.segments) <= limit:
        return [_single(segment, paints, pins, pieces) for segment in pool.segments]
    alone = sorted(pool.segments, key=lambda segment: (-segment.part(STRANDED), -segment.size, segment.address))[: limit // 2]
    chosen = {segment.address for segment in alone}
    rows = [_single(segment, paints, pins, pieces) for segment in pool.segments if segment.address in chosen]
    groups: dict[tuple[_State, int], list[MapSegment]] = {}
    for segment in pool.segments:
        if segment.address not in chosen:
            groups.setdefault((_state(segment), segment.size), []).append(segment)
    room = limit - len(rows)
    ordered = sorted(groups.items(), key=lambda item: -sum(segment.size for segment in item[1]))
    kept = ordered if len(ordered) <= room else ordered[: max(0, room - 1)]
    rows += [_sum(segments, paints, _note(segments, paints.holders, state)) for (state, _), segments in kept]
    left = [segment for _, segments in ordered[len(kept) :] for segment in segments]
    return [*rows, _sum(left, paints, _several(left))] if left else rows


def _several(segments: Sequence[MapSegment]) -> str:
    """Return the states of segments of several sizes: 'of several sizes: 40 pinned, 12 full'."""
    counts = Counter(map(_state, segments))
    return "of several sizes: " + ", ".join(f"{count} {state.words}" for state, count in counts.items())


def _state(segment: MapSegment) -> _State:
    free = {block.holder for block in segment.blocks if block.holder < 0}
    if KEPT in free:
        return _State.PARTLY_KEPT if len(segment.blocks) > 1 else _State.KEPT
    if STRANDED in free:
        return _State.PINNED
    if not free:
        return _State.FULL
    return _State.FREE if len(segment.blocks) == 1 else _State.PAGES_FREE


def _pins_by_segment(device: DeviceMap) -> dict[int, list[Pinner]]:
    """Return the pins of each segment, by its address; an expandable one can be pinned in several places, the worst first."""
    by_segment: dict[int, list[Pinner]] = {}
    starts = sorted((segment.address, segment.size) for pool in device.pools for segment in pool.segments)
    for pinner in device.pinners:
        for start, size in _around(starts, pinner.address):
            if start <= pinner.address < start + size:
                by_segment.setdefault(start, []).append(pinner)
    return by_segment


def _around(starts: Sequence[tuple[int, int]], address: int) -> Sequence[tuple[int, int]]:
    at = bisect_right(starts, (address, 1 << 62))
    return starts[max(0, at - 1) : at]


def _single(segment: MapSegment, paints: Paints, pins: Mapping[int, Sequence[Pinner]], limit: int) -> MapRow:
    pieces = list(_pieces(segment, paints))
    if is_summed := len(pieces) > limit:
        pieces = _added_up(pieces, paints)
    pinners = pins.get(segment.address, ())
    blocks = [block for pinner in pinners for block in pinner.blocks]
    marks: tuple[int, ...] = ()
    if not is_summed and len(blocks) <= _MARKS:
        marks = tuple(block.address - segment.address + block.size // 2 for block in blocks)
    note = pin_note(pinners[0]) if pinners else _note([segment], paints.holders, _state(segment))
    if len(pinners) > 1:
        note += f" · and {len(pinners) - 1} more such {'places' if len(pinners) > 2 else 'place'}"
    if is_summed:
        note += f" · {len(segment.blocks)} blocks, added up"
    return MapRow(count=1, nbytes=segment.size, pieces=tuple(pieces), note=note, marks=marks, is_summed=is_summed)


def _note(segments: Sequence[MapSegment], holders: Sequence[MapHolder], state: _State) -> str:
    """Return the note on segments that do not stand alone: the holders in those that are pinned, the most frequent first."""
    if state is not _State.PINNED:
        return state.note
    counts: dict[str, int] = {}
    for segment in segments:
        for place in {block.holder for block in segment.blocks if block.holder >= 0}:
            name = _blocks_of(holders[place].label, holders[place].source)
            counts[name] = counts.get(name, 0) + 1
    first = sorted(counts, key=lambda name: (-counts[name], name))
    names = ", ".join(first[:2]) + (f" and {len(first) - 2} more" if len(first) > 2 else "")
    return f"pinned by {names}: {format_bytes(sum(segment.part(STRANDED) for segment in segments))} stranded"


def _sum(segments: Sequence[MapSegment], paints: Paints, note: str) -> MapRow:
    pieces = _added_up([piece for segment in segments for piece in _pieces(segment, paints)], paints)
    size = sum(segment.size for segment in segments)
    return MapRow(count=len(segments), nbytes=size, pieces=tuple(pieces), note=note, is_summed=True)


def _pieces(segment: MapSegment, paints: Paints) -> Iterator[RowPiece]:
    """Yield the stretches of a segment by address; neighbours of one holder are one piece."""
    run, paint, count = 0, "", 0
    for block in segment.blocks:
        now = paints.of_block(block.holder)
        if now != paint and run:
            yield _piece(run, paint, count, paints)
            run = count = 0
        run, paint, count = run + block.size, now, count + 1
    if run:
        yield _piece(run, paint, count, paints)


def _piece(nbytes: int, paint: str, count: int, paints: Paints) -> RowPiece:
    blocks = f" in {count} blocks" if count > 1 else ""
    return RowPiece(nbytes, paint, f"{paints.label(paint)}: {format_bytes(nbytes)}{blocks}")


def _added_up(pieces: Sequence[RowPiece], paints: Paints) -> list[RowPiece]:
    """Return one piece for each paint, holders first, with all its bytes."""
    total = Counter[str]()
    for piece in pieces:
        total[piece.paint] += piece.nbytes
    last = (OTHERS, *WORDS.values())
    order = sorted(total, key=lambda paint: (last.index(paint) + 1 if paint in last else 0, -total[paint]))
    return [_piece(total[paint], paint, 1, paints) for paint in order]


def pin_note(pinner: Pinner) -> str:
    """Return the holders that pin a segment, in words: 'pinned by losses[3] (512 B): gives 20 MiB back'."""
    names: dict[str, int] = {}
    for block in pinner.blocks:
        name = block.path or _blocks_of(block.holder, block.source)
        names[name] = names.get(name, 0) + block.size
    first = sorted(names.items(), key=lambda item: -item[1])
    words = ", ".join(name for name, _ in first[:2]) + (f" and {len(first) - 2} more" if len(first) > 2 else "")
    return f"pinned by {words} ({format_bytes(pinner.pinned_by)}): gives {format_bytes(pinner.gives_back)} back"


def _blocks_of(label: str, source: HolderSource) -> str:
    """Return a holder in a sentence: the label of blocks without one says how they came about, `allocated at train.py:3`."""
    return f"a block {label}" if source in ("unknown", "site", "pending") else label
