"""Blocks as text for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from nbguard.render.blocks import NAME, Block, Facts, Head, Listing, Parts, Picture, Point, Points, Table, clean, told

_WORD = 11
"""Characters of the word before a fact; the sentences stand below one another."""


def blocks_text(blocks: Iterable[Block]) -> str:
    """Return blocks as text; facts stand close together, all else apart."""
    lines: list[str] = []
    before: Block | None = None
    for block in blocks:
        shown = block.brief if isinstance(block, Table) and block.fold else block
        found = [] if shown is None else [line.replace("`", "").rstrip() for line in _lines(shown)]
        if not found:
            continue
        if before is not None and not (_is_close(before) and _is_close(shown)):
            lines.append("")
        lines += found
        before = shown
    return "\n".join(lines)


def _is_close(block: Block | None) -> bool:
    return isinstance(block, (Facts, Parts)) or (isinstance(block, Listing) and not block.title)


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Head(title, ending, figures, warns):
            ended = f"partial, {clean(ending)}" if warns else clean(ending)
            yield " · ".join((clean(title, NAME), ended, figures))
        case Facts(rows):
            yield from (f"  {word:<{_WORD}}  {clean(sentence)}" for word, sentence in rows)
        case Table():
            yield from _table(block)
        case Parts(name, parts):
            yield f"  {name:<{_WORD}}  " + "   ".join(f"{clean(part.name, NAME)} {part.figure}" for part in parts)
        case Listing(title, sentences, is_numbered):
            yield from [f"  {title}"] if title else []
            marks = (f"{number}." if is_numbered else "○" for number in range(1, len(sentences) + 1))
            yield from (f"  {mark} {clean(sentence)}" for mark, sentence in zip(marks, sentences, strict=True))
        case Points(points):
            for point in points:
                yield from _point(point)
        case Picture():
            return


def _table(table: Table) -> Iterator[str]:
    names, rows, figures = told(table)
    shown = [
        (f"  {cells[0]}" if row.kind == "part" else cells[0], *cells[1:]) for row, cells in zip(table.rows, rows, strict=True)
    ]
    yield from aligned([names, *shown], figures)


def _point(point: Point) -> Iterator[str]:
    yield f"  {point.word:<{_WORD}}  {clean(point.what)}"
    yield from (f"  {'':<{_WORD}}  {clean(line)}" for line in point.lines)


def aligned(table: Sequence[Sequence[str]], figures: Collection[int]) -> Iterator[str]:
    """Yield the lines of a table; the columns `figures` end where their heading ends, the last of all is not padded."""
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    for row in table:
        cells = (f"{cell:>{widths[n]}}" if n in figures else f"{cell:<{widths[n]}}" for n, cell in enumerate(row))
        yield "  " + "   ".join(cells).rstrip()
