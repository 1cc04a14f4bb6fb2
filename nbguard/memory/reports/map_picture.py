"""The segments of a device as a picture, with a bar per segment, in SVG with a key, or as lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.reports.map_rows import OTHERS, WORDS, MapRow, Paints, rows_of
from nbguard.memory.reports.memory_map import DeviceMap, MapPool
from nbguard.render.html import key
from nbguard.render.markup import Html, join, tag
from nbguard.render.svg import box, drawing, titled, words
from nbguard.render.words import NAME, clip
from nbguard.units import counted, format_bytes

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
