"""Blocks as text for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count

from nbguard.render.html import (
    Bar,
    Block,
    FactLines,
    Fold,
    Head,
    Line,
    Listing,
    Picture,
    Point,
    Points,
    Section,
    Table,
    Title,
    said,
    shown_columns,
)
from nbguard.render.markup import NAME, clean
from nbguard.texts import Host, printable

# --- Commands of GitHub's workflows, which mark lines of a pull request


def workflow_command(kind: str, message: str, **properties: str | int) -> str:
    """Return the line that marks something, as in `::error file=train.py,line=3,title=nbguard::it ran out of memory`."""
    given = ",".join(f"{name}={_of_property(str(value))}" for name, value in properties.items())
    return f"::{kind} {given}::{_escaped(message)}"


def _of_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# --- text


_WORD = 11
"""Characters of the word before a fact; the sentences stand below one another."""
_BAR = 72
"""Characters of a bar."""


def blocks_text(blocks: Iterable[Block], where: Host = "notebook") -> str:
    """Return blocks as text for a host: sentences and short lists stand close together, tables and long lists apart.

    Each line can be printed, whatever the blocks quote.
    """
    lines: list[str] = []
    before: Block | None = None
    for block in said(blocks, where):
        shown = block.brief if isinstance(block, Table) and block.brief is not None else block
        new = [printable(line).replace("`", "").rstrip() for line in _lines(shown)]
        if not new:
            continue
        if before is not None and not _are_close(before, shown):
            lines.append("")
        lines += new
        before = shown
    return "\n".join(lines)


def _are_close(before: Block, after: Block) -> bool:
    """Say whether two blocks stand together without an empty line between them."""
    if isinstance(after, (Section, Title)):
        return isinstance(before, Title)
    if isinstance(before, Line) and isinstance(after, Listing):
        return False
    return _is_short(before) and _is_short(after)


def _is_short(block: Block) -> bool:
    match block:
        case Head() | Points():
            return False
        case Table(names=names):
            return not names
        case Listing(title=title):
            return not title
    return True


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Head(title, ending, figures, warns):
            ended = f"partial, {clean(ending)}" if warns else clean(ending)
            yield " · ".join((clean(title, NAME), ended, figures))
        case Section(name, what, figures):
            yield "  ".join(clean(word) for word in (name, what, figures) if word)
        case Title(sentence):
            yield clean(sentence)
        case Line(sentence):
            yield f"  {clean(sentence)}"
        case FactLines(rows):
            yield from (f"  {word:<{_WORD}}  {clean(sentence)}" for word, sentence in rows)
        case Table():
            yield from _table(block)
        case Bar():
            yield from _bar(block)
        case Listing(sentences=sentences, title=title, is_numbered=is_numbered, mark=mark):
            yield from [f"  {title}"] if title else []
            marks = (f"{number}." if is_numbered else mark for number in count(1))
            yield from (f"  {mark} {clean(sentence)}" for mark, sentence in zip(marks, sentences, strict=False))
        case Points(points, title, is_numbered):
            yield from [f"  {title}"] if title else []
            for number, point in enumerate(points, 1):
                yield from _numbered(number, point) if is_numbered else _point(point)
        case Picture(lines=lines):
            yield from map(clean, lines)
        case Fold(brief=brief):
            yield from [f"  {clean(brief)}"] if brief else []


def _table(table: Table) -> Iterator[str]:
    columns = shown_columns(table)
    cells = [
        (f"{row.rails}{'  ' if row.kind == 'part' else ''}{first}", *rest)
        for row, (first, *rest) in zip(table.rows, columns.rows, strict=True)
    ]
    if table.names:
        yield from aligned([columns.names, *cells], columns.figures)
    elif cells:
        yield from aligned(cells, columns.figures, gap=2)


def _bar(bar: Bar) -> Iterator[str]:
    if bar.is_drawn_as_text:
        yield f"  ▏{_drawn(bar)}▏"
    name = f"{bar.name:<{_WORD}}  " if bar.name else ""
    yield f"  {name}" + "   ".join(f"{clean(part.name, NAME)} {part.figure}" for part in bar.slices)


def _drawn(bar: Bar) -> str:
    whole = bar.whole or 1
    text, reached = "", 0
    for part in bar.slices:
        reached += part.amount
        cells = round(min(reached / whole, 1) * _BAR) - len(text)
        is_seen = part.amount > whole / 1000 and part.colour
        text += (part.mark if part.colour else " ") * max(cells, 1 if is_seen else 0)
    return text[:_BAR].ljust(_BAR)


def _point(point: Point) -> Iterator[str]:
    yield f"  {point.word:<{_WORD}}  {clean(point.what)}"
    yield from (f"  {'':<{_WORD}}  {clean(line)}" for line in point.lines)


def _numbered(number: int, point: Point) -> Iterator[str]:
    yield f"  {number}. {' · '.join(clean(word) for word in (point.word, point.what) if word)}"
    yield from (f"     {clean(line)}" for line in point.lines)


def aligned(table: Sequence[Sequence[str]], figures: Collection[int], gap: int = 3) -> Iterator[str]:
    """Yield the lines of a table; the columns `figures` end where their heading ends, the last of all is not padded."""
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    for row in table:
        cells = (f"{cell:>{widths[n]}}" if n in figures else f"{cell:<{widths[n]}}" for n, cell in enumerate(row))
        yield "  " + (" " * gap).join(cells).rstrip()
