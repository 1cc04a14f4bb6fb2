"""The map of segments and blocks as text, and as HTML with one picture: inline SVG in the colours of the host's theme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from nbguard.render.elements import columns, head_line, listed, page, table_row
from nbguard.render.map_rows import OTHERS, WORDS, MapRow, Paints, rows_of
from nbguard.render.map_words import facts_lines, pin_table
from nbguard.reports.memory_map import DeviceMap, MemoryMap
from nbguard.units import format_bytes

_PIECES, _ROWS = 1000, 120
"""At most about so many rectangles, and rows, in all: a picture of any number of blocks stays small."""
_FEWEST, _MOST = 6, 80
_CELLS = 40
_LETTERS = "ABCDEF"
_MARKS = {"releasable": "▒", "stranded": "░", "free for a graph": "┄", OTHERS: "█"}


def map_text(found: MemoryMap, limit: int = 12) -> str:
    """Return the map as text: a line per segment of each pool, at most `limit` of them, who pins what, the largest request."""
    lines = [_origin(found), ""] if found.file else []
    lines += [line for device in found.devices for line in (*_device_lines(device, limit, _CELLS), "")]
    if found.without:
        lines.append(_without(found))
    return "\n".join(lines).replace("`", "").rstrip()


def _origin(found: MemoryMap) -> str:
    return " · ".join((found.file, *found.notes))


def _without(found: MemoryMap) -> str:
    return found.why_not if found.tracked == "cpu" else f"{', '.join(found.without)}: {found.why_not}"


def summary(device: DeviceMap) -> str:
    """Return a device's memory in a sentence whose figures re-add to what is reserved."""
    space = device.space
    parts = {name: getattr(space, name) for name in ("allocated", "pending", "releasable", "stranded")}
    parts["kept for graphs"] = space.kept
    shown = " + ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes)
    return f"reserved {format_bytes(space.reserved)}" + (f" = {shown}" if shown else "")


def _device_lines(device: DeviceMap, limit: int, pieces: int) -> Iterator[str]:
    yield f"{device.device}  {device.name}  {summary(device)}"
    paints = Paints.of(device)
    letters = {str(place): letter for place, letter in zip(paints.named, _LETTERS, strict=False)}
    for pool in device.pools:
        count = len(pool.segments)
        yield ""
        yield f"  {pool.name}: {count} segment{'s' if count != 1 else ''}, {format_bytes(pool.space.reserved)}"
        rows = rows_of(device, pool, limit, pieces)
        wide = max(len(row.size) for row in rows)
        for row in rows:
            yield f"  {row.size:>{wide}}  ▏{_cells(row, letters)}▏ {row.note}".rstrip()
    yield ""
    yield "  " + "   ".join(_text_key(device, letters))
    if table := pin_table(device, limit):
        yield ""
        yield from _aligned(table)
    yield ""
    yield from (f"  • {line}" for line in facts_lines(device))


def _text_key(device: DeviceMap, letters: dict[str, str]) -> Iterator[str]:
    shown = _shown_paints(device)
    for place, letter in letters.items():
        yield f"{letter} {device.holders[int(place)].label} {format_bytes(device.holders[int(place)].nbytes)}"
    for word, mark in _MARKS.items():
        if word in shown:
            yield f"{mark} {word}"


def _shown_paints(device: DeviceMap) -> set[str]:
    paints = Paints.of(device)
    return {paints.of_block(block.holder) for pool in device.pools for each in pool.segments for block in each.blocks}


def _cells(row: MapRow, letters: dict[str, str]) -> str:
    """Return a row as characters, each the paint of most of its bytes; a live one wins over free bytes where it pins them."""
    text, reached = "", 0
    for piece in row.pieces:
        reached += piece.nbytes
        mark = letters.get(piece.paint) or _MARKS[piece.paint]
        cells = round(reached / row.nbytes * _CELLS) - len(text)
        text += mark * max(cells, 1 if piece.paint not in WORDS.values() else 0)
    return text[:_CELLS].ljust(_CELLS, text[-1:])


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [min(44, max(len(row[place]) for row in table)) for place in range(len(table[0]))]
    for name, pins, *figures, said in table:
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(figures, widths[2:-1], strict=True))
        yield f"  {_clip(name, 44):<{widths[0]}}  {pins:<{widths[1]}}  {cells}  {said}".rstrip()


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


# --- the picture ------------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _BAR = 860, 122, 330
_RIGHT = _LEFT + _BAR + 10
_LINE, _HEIGHT, _HEAD = 22, 15, 26
_NOTE = 66
_HOLDERS = ("--h0", "--h1", "--h2", "--h3", "--h4", "--h5")
_COLOURS = {"releasable": "--rel", "stranded": "--strand", "free for a graph": "--other", OTHERS: "--ctx"}


def map_html(found: MemoryMap, limit: int = 12) -> str:
    """Return the map as HTML: per device a picture with its legend, who pins what, and the same sentences as the text."""
    limit = min(limit, max(3, _ROWS // max(1, sum(len(device.pools) for device in found.devices))))
    count = sum(min(limit, len(pool.segments)) for device in found.devices for pool in device.pools)
    pieces = max(_FEWEST, min(_MOST, _PIECES // max(1, count)))
    body = f'<div class="dim">{escape(_origin(found))}</div>' if found.file else ""
    body += "".join(_device(device, limit, pieces) for device in found.devices)
    if found.without:
        body += f'<div class="dim">{escape(_without(found))}</div>'
    return page(body)


def _device(device: DeviceMap, limit: int, pieces: int) -> str:
    reserved = f"reserved {format_bytes(device.space.reserved)}"
    head = head_line(device.device, device.name, reserved) + f'<div class="dim">{escape(summary(device))}</div>'
    table = ""
    if rows := pin_table(device, limit):
        figures = (2, 3, 4)
        body = "".join(
            table_row(f"<code>{escape(name)}</code>", *map(escape, rest), numbers=figures) for name, *rest in rows[1:]
        )
        table = columns(rows[0], figures, body)
    return head + picture(device, limit, pieces) + _key(device) + table + listed(facts_lines(device))


@dataclass(slots=True)
class _Canvas:
    """Where the next row goes."""

    y: int = 0


def picture(device: DeviceMap, limit: int, pieces: int) -> str:
    """Return the SVG of one device: a bar per segment, as long as it is large within its pool."""
    canvas, inside = _Canvas(), ""
    for pool in device.pools:
        count = len(pool.segments)
        said = f"{pool.name}: {count} segment{'s' if count != 1 else ''}, {format_bytes(pool.space.reserved)}"
        inside += f'<text x="0" y="{canvas.y + 18}" style="fill:var(--ink);font-weight:600">{escape(said)}</text>'
        canvas.y += _HEAD
        rows = rows_of(device, pool, limit, pieces)
        longest = max(row.nbytes / row.count for row in rows)
        for row in rows:
            inside += "".join(_bar(row, device, canvas.y, longest))
            canvas.y += _LINE
    segments = sum(len(pool.segments) for pool in device.pools)
    label = escape(
        f"Map of {segments} segments on {device.device}: {summary(device)}; the table below says who pins what", quote=True
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {canvas.y + 4}" '
        f'style="width:100%;height:auto;display:block;font-size:11px;fill:var(--dim)">{inside}</svg>'
    )


def _bar(row: MapRow, device: DeviceMap, y: int, longest: float) -> Iterator[str]:
    """Yield one row: its size, its pieces from left to right, what pins it, and the words on it."""
    paints = Paints.of(device)
    wide = max(6.0, _BAR * row.nbytes / row.count / longest)
    yield f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(row.size)}</text>'
    yield f'<g data-bytes="{row.nbytes}">'
    reached = 0
    for piece in row.pieces:
        start = wide * reached / row.nbytes
        reached += piece.nbytes
        size = wide * reached / row.nbytes - start
        place = int(piece.paint) if piece.paint.isdigit() else -1
        colour = _HOLDERS[paints.named.index(place)] if place >= 0 else _COLOURS[piece.paint]
        yield (
            f'<rect x="{_LEFT + start:.2f}" y="{y}" width="{size:.2f}" height="{_HEIGHT}" data-bytes="{piece.nbytes}" '
            f'style="fill:var({colour})"><title>{escape(piece.title)}</title></rect>'
        )
    yield "</g>"
    for mark in row.marks:
        x = _LEFT + wide * mark / row.nbytes
        yield f'<path d="M{x - 4:.1f} {y - 4}h8l-4 6z" style="fill:var(--warn)"><title>{escape(row.note)}</title></path>'
    yield (
        f'<rect x="{_LEFT}" y="{y}" width="{wide:.2f}" height="{_HEIGHT}" style="fill:none;stroke:var(--line)"/>'
        f'<text x="{_RIGHT}" y="{y + 12}"><title>{escape(row.note)}</title>{escape(_clip(row.note, _NOTE))}</text>'
    )


def _key(device: DeviceMap) -> str:
    """Return the legend: what each colour and the mark mean, in words."""
    paints, shown = Paints.of(device), _shown_paints(device)
    words = ""
    for place, colour in zip(paints.named, _HOLDERS, strict=False):
        holder = device.holders[place]
        stale = " · stale" if holder.stale else ""
        words += _entry(colour, f"{escape(holder.label)} <b>{format_bytes(holder.nbytes)}</b>{stale}")
    meaning = {
        OTHERS: "other holders",
        "releasable": "free, emptying the cache gives it back",
        "stranded": "free, stranded: a live block keeps its segment",
        "free for a graph": "free for a CUDA graph or MemPool only",
    }
    words += "".join(_entry(_COLOURS[paint], text) for paint, text in meaning.items() if paint in shown)
    pins = '<span><span style="color:var(--warn)">▼</span> pins its segment</span>' if device.pinners else ""
    return f'<div class="key">{words}{pins}</div>'


def _entry(colour: str, words: str) -> str:
    return f'<span><i style="background:var({colour})"></i>{words}</span>'
