"""Blocks as HTML: every word of theirs is escaped here."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from nbguard.render.blocks import NAME, Block, Facts, Head, Listing, Parts, Picture, Point, Points, Row, Table, clean, told
from nbguard.render.elements import columns, listed, page, table_row, with_code


def blocks_html(blocks: Iterable[Block], label: str) -> str:
    """Return blocks as a whole result; `label` says to who cannot see it what it is."""
    return page("".join(map(_block, blocks)), label)


def _block(block: Block) -> str:
    match block:
        case Head():
            return _head(block)
        case Facts(rows):
            cells = ((f'<span class="dim">{escape(word)}</span>', _words(sentence)) for word, sentence in rows)
            return f'<table class="facts"><tbody>{"".join(table_row(*each) for each in cells)}</tbody></table>'
        case Table():
            return _table(block)
        case Parts():
            return _parts(block)
        case Listing():
            return _listing(block)
        case Points(points):
            return f'<table class="points"><tbody>{"".join(map(_point, points))}</tbody></table>'
        case Picture(html):
            return html


def _words(sentence: str) -> str:
    return with_code(clean(sentence))


def _head(head: Head) -> str:
    ending = escape(clean(head.ending))
    ending = f'<span class="chip">partial</span> {ending}' if head.warns else f'<span class="dim">{ending}</span>'
    title = escape(clean(head.title, NAME))
    return f'<div class="head"><b>{title}</b><span>{ending}</span><span class="right">{escape(head.figures)}</span></div>'


def _table(table: Table) -> str:
    names, rows, figures = told(table)
    is_measured = any(row.share is not None for row in table.rows)
    body = "".join(_row(row, cells, figures, is_measured) for row, cells in zip(table.rows, rows, strict=True))
    if is_measured:
        names, figures = (names[0], "", *names[1:]), [place + 1 for place in figures]
    found = columns(map(escape, names), figures, body)
    found = found if is_measured else f'<div class="narrow">{found}</div>'
    return f"<details><summary>{escape(table.fold)}</summary>{found}</details>" if table.fold else found


def _row(row: Row, cells: tuple[str, ...], figures: list[int], is_measured: bool) -> str:
    shown = list(map(with_code, cells))
    places = figures
    if is_measured:
        shown.insert(1, "" if row.share is None else _meter(row))
        places = [place + 1 for place in figures]
    return table_row(*shown, numbers=places, row=f'tr class="{row.kind}"' if row.kind else "tr")


def _meter(row: Row) -> str:
    return f'<span class="meter"><i style="width:{100 * (row.share or 0):.1f}%;background:var(--{row.colour})"></i></span>'


def _parts(parts: Parts) -> str:
    whole = sum(max(0, part.amount) for part in parts.parts) or 1
    cells, keys = "", ""
    for part in parts.parts:
        colour = f"background:var(--{part.colour})"
        name = escape(clean(part.name, NAME))
        cells += f'<i style="width:{100 * max(0, part.amount) / whole:.2f}%;{colour}"></i>'
        keys += f'<span><i style="{colour}"></i>{name} <b>{escape(part.figure)}</b></span>'
    label = escape(f"{parts.name}: the figures are below")
    return (
        f'<div class="dim">{escape(parts.name)}</div><div class="bar" role="img" aria-label="{label}">{cells}</div>'
        f'<div class="key">{keys}</div>'
    )


def _listing(listing: Listing) -> str:
    title = f'<div class="title">{escape(listing.title)}</div>' if listing.title else ""
    return title + listed(map(clean, listing.sentences), is_numbered=listing.is_numbered)


def _point(point: Point) -> str:
    word = f'<span class="{"chip" if point.warns else "dim"}">{escape(point.word)}</span>'
    lines = "".join(f'<div class="dim">{_words(line)}</div>' for line in point.lines)
    return table_row(word, _words(point.what) + lines)
