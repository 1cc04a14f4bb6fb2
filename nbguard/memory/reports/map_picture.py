"""The segments of a device as a picture, with the rows of the map, in SVG with a key, or as lines of a terminal."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from nbguard.memory.core.facts import HolderSource
from nbguard.memory.core.pinning import Pinner
from nbguard.memory.reports.memory_map import KEPT, RELEASABLE, STRANDED, DeviceMap, MapHolder, MapPool, MapSegment
from nbguard.render.html import key
from nbguard.render.markup import NAME, Html, clip, join, tag
from nbguard.render.svg import box, drawing, titled, words
from nbguard.units import counted, format_bytes

# --- The rows of the map, for text and picture alike, with a line per segment, similar ones together where there are many.


OTHERS = "other holders"
WORDS = {RELEASABLE: "releasable", STRANDED: "stranded", KEPT: "free for a graph"}
NAMED = 6
"""So many holders have a colour of their own, the largest."""
_MARKS_of_map_rows = 8
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
    pieces = list(_pieces_of_map_rows(segment, paints))
    if is_summed := len(pieces) > limit:
        pieces = _added_up(pieces, paints)
    pinners = pins.get(segment.address, ())
    blocks = [block for pinner in pinners for block in pinner.blocks]
    marks: tuple[int, ...] = ()
    if not is_summed and len(blocks) <= _MARKS_of_map_rows:
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
    pieces = _added_up([piece for segment in segments for piece in _pieces_of_map_rows(segment, paints)], paints)
    size = sum(segment.size for segment in segments)
    return MapRow(count=len(segments), nbytes=size, pieces=tuple(pieces), note=note, is_summed=True)


def _pieces_of_map_rows(segment: MapSegment, paints: Paints) -> Iterator[RowPiece]:
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


_LEFT, _BAR = 122, 330
_RIGHT = _LEFT + _BAR + 10
_LINE, _HEIGHT, _HEAD = 22, 15, 26
_NOTE = 66
_COLOURS = {"releasable": "rel", "stranded": "strand", "free for a graph": "other", OTHERS: "ctx"}
_MEANINGS = {
    OTHERS: "other holders",
    "releasable": "free, emptying the cache gives it back",
    "stranded": "free, stranded: a live block keeps its segment",
    "free for a graph": "free for a CUDA graph or MemPool only",
}
_CELLS = 40
"""Characters of a bar in a terminal."""
_LETTERS = "ABCDEF"
_MARKS = {"releasable": "▒", "stranded": "░", "free for a graph": "┄", OTHERS: "█"}


def summary(device: DeviceMap) -> str:
    """Return a device's memory in a sentence whose figures add up to the reserved bytes."""
    space = device.space
    parts = {name: getattr(space, name) for name in ("allocated", "pending", "releasable", "stranded")}
    parts["kept for graphs"] = space.kept
    shown = " + ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
    return f"reserved {format_bytes(space.reserved)}" + (f" = {shown}" if shown else "")


def map_picture(device: DeviceMap, limit: int, pieces: int) -> Html:
    """Return the picture of one device with its key: each bar is as long as its segment is large within the pool."""
    inside, height = bars(device, limit, pieces)
    segments = counted(sum(len(pool.segments) for pool in device.pools), "segment")
    label = f"Map of {segments} on {device.device}: {summary(device)}; the table below says who pins what"
    return join((drawing(label, height, inside), key(*key_entries(device), note=key_note(device))))


def bars(device: DeviceMap, limit: int, pieces: int) -> tuple[list[Html], int]:
    """Return the shapes of one device's segments, and the pixels that they are high."""
    y, inside = 0, list[Html]()
    for pool in device.pools:
        inside.append(words(0, y + 18, _pool(pool), style="fill:var(--ink);font-weight:600"))
        y += _HEAD
        rows = rows_of(device, pool, limit, pieces)
        longest = max(row.nbytes / row.count for row in rows)
        for row in rows:
            inside += _bar(row, device, y, longest)
            y += _LINE
    return inside, y + 4


def _pool(pool: MapPool) -> str:
    return f"{pool.name}: {counted(len(pool.segments), 'segment')}, {format_bytes(pool.space.reserved)}"


def _bar(row: MapRow, device: DeviceMap, y: int, longest: float) -> Iterator[Html]:
    """Yield one row: its size, its pieces from left to right, marks on pins, and its note."""
    wide = max(6.0, _BAR * row.nbytes / row.count / longest)
    yield words(_LEFT - 8, y + 12, row.size, anchor="end")
    yield tag("g", *_pieces(row, Paints.of(device), y, wide), data_bytes=row.nbytes)
    for mark in row.marks:
        x = _LEFT + wide * mark / row.nbytes
        yield tag("path", *titled(row.note), d=f"M{x - 4:.1f} {y - 4}h8l-4 6z", style="fill:var(--warn)")
    outline = "fill:none;stroke:var(--line)"
    yield tag("rect", x=_LEFT, y=y, width=f"{wide:.2f}", height=_HEIGHT, style=outline)
    yield words(_RIGHT, y + 12, clip(row.note, _NOTE), title=row.note)


def _pieces(row: MapRow, paints: Paints, y: int, wide: float) -> Iterator[Html]:
    reached = 0
    for piece in row.pieces:
        start = wide * reached / row.nbytes
        reached += piece.nbytes
        size = wide * reached / row.nbytes - start
        colour = f"h{paints.named.index(int(piece.paint))}" if piece.paint.isdigit() else _COLOURS[piece.paint]
        yield box(round(_LEFT + start, 2), y, f"{size:.2f}", _HEIGHT, colour, title=piece.title, nbytes=piece.nbytes)


def key_entries(device: DeviceMap) -> list[tuple[str, str, str]]:
    """Return the entries of the key: (colour, name, figure) of each."""
    named = [device.holders[place] for place in Paints.of(device).named]
    entries = [
        (f"h{number}", f"{clip(holder.label, NAME)}{' · stale' if holder.stale else ''}", format_bytes(holder.nbytes))
        for number, holder in enumerate(named)
    ]
    shown = _shown_paints(device)
    return entries + [(_COLOURS[paint], meaning, "") for paint, meaning in _MEANINGS.items() if paint in shown]


def key_note(device: DeviceMap) -> str:
    """Return the meaning of a picture's mark, or "" where it has none."""
    return "▼ pins its segment" if device.pinners else ""


def map_lines(device: DeviceMap, limit: int) -> Iterator[str]:
    """Yield the same for a terminal: a line per segment, letters for holders."""
    named = Paints.of(device).named
    letters = {str(place): letter for place, letter in zip(named, _LETTERS, strict=False)}
    for pool in device.pools:
        yield ""
        yield f"  {_pool(pool)}"
        rows = rows_of(device, pool, limit, _CELLS)
        wide = max(len(row.size) for row in rows)
        yield from (f"  {row.size:>{wide}}  ▏{_cells(row, letters)}▏ {row.note}" for row in rows)
    shown = _shown_paints(device)
    holders = [device.holders[place] for place in named]
    named_words = [f"{clip(holder.label, NAME)} {format_bytes(holder.nbytes)}" for holder in holders]
    key_words = [f"{letter} {name}" for letter, name in zip(_LETTERS, named_words, strict=False)]
    key_words += [f"{mark} {word}" for word, mark in _MARKS.items() if word in shown]
    yield ""
    yield "  " + "   ".join(key_words)


def _shown_paints(device: DeviceMap) -> set[str]:
    paints = Paints.of(device)
    return {paints.of_block(block.holder) for pool in device.pools for segment in pool.segments for block in segment.blocks}


def _cells(row: MapRow, letters: dict[str, str]) -> str:
    """Return a row as characters, each the paint of most of its bytes; a live one wins over free bytes where it pins them."""
    text, reached = "", 0
    for piece in row.pieces:
        reached += piece.nbytes
        mark = letters.get(piece.paint) or _MARKS[piece.paint]
        cells = round(reached / row.nbytes * _CELLS) - len(text)
        text += mark * max(cells, 1 if piece.paint not in WORDS.values() else 0)
    return text[:_CELLS].ljust(_CELLS, text[-1:])
