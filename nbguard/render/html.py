"""Blocks as self-contained HTML with no script, no network, only colours of the host's theme."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from nbguard.render.markup import NAME, SENTENCE, Html, clean, join, style_sheet, tag, with_code
from nbguard.texts import Host, Text, form

# --- Blocks of words and figures that every result is made of, the same for text and HTML. Nothing in them is escaped.
#
# A back end (`text`, `html`) knows the blocks and no result; a result's view knows its blocks and no back end.


Tone: TypeAlias = Literal["plain", "dim", "strong"]


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a long report."""

    title: str  # the subject of the report
    ending: str  # how it ended
    figures: str  # the most important ones
    warns: bool = False  # whether the report is of a part only


@dataclass(frozen=True, slots=True)
class Section:
    """The line above the blocks on one thing: a device, a name, an error."""

    name: str
    what: str = ""  # the thing in a few words
    figures: str = ""  # at the right, where there is a right


@dataclass(frozen=True, slots=True)
class Title:
    """A sentence above or beside all sections, on the result as a whole."""

    sentence: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence by itself within a section."""

    sentence: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class FactLines:
    """Sentences, each behind a word."""

    rows: tuple[tuple[str, str], ...]  # (word, sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table: cells in the order of the columns, and how they are drawn."""

    cells: tuple[str, ...]  # words and figures, one for each column of the table
    kind: Literal["", "group", "part", "sum"] = ""  # a group stands above its parts, the sum below all
    share: float | None = None  # of the whole, 0…1: as a bar, where there are pictures
    colour: str = "used"  # of that bar
    rails: str = ""  # lines of a tree in front of the first cell
    hint: str = ""  # shown where the mouse rests on the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. Columns without a single word are left out."""

    rows: tuple[TableRow, ...]  # all of as many cells
    names: tuple[str, ...] = ()  # headings; empty for a list of steps
    figures: Collection[int] = ()  # places of the columns of numbers
    code: Collection[int] = ()  # places of the columns of names and commands
    chips: Collection[int] = ()  # places of the columns of warnings in a word
    widest: int = NAME  # characters of a cell, but for the last
    fold: str = ""  # words behind which the table lies in a notebook
    brief: Block | None = None  # stands for the table in a terminal, if given; an empty one for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a whole, with its figure."""

    name: str  # of the part
    figure: str  # its bytes, in the unit of the whole
    amount: int  # bytes
    colour: str = ""  # none: the rest is empty
    mark: str = "█"  # the character of a bar in a terminal
    note: str = ""  # shown where the mouse rests


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A whole as its slices side by side, with their figures."""

    slices: tuple[Slice, ...]  # from left to right
    name: str = ""  # of the whole
    whole: int | None = None  # bytes, where they are more than those of all slices that have a colour
    label: str = ""  # for readers who cannot see it
    is_drawn_as_text: bool = False  # whether a terminal draws the bar, too, or shows its figures only


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Sentences below one another."""

    sentences: tuple[str, ...]
    title: str = ""
    is_numbered: bool = False
    mark: str = "○"  # before each, in a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Something that stands out."""

    word: str  # how much it matters
    what: str
    lines: tuple[str, ...] = ()  # that say more
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Points:
    """Points below one another."""

    points: tuple[Point, ...]
    title: str = ""
    is_numbered: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as SVG with its key, and the lines that a terminal shows instead, if any."""

    html: Html
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks behind a line that a click opens. A terminal shows a sentence instead."""

    name: str  # of the things behind it
    blocks: tuple[Block, ...]
    brief: str = ""  # for a terminal; empty if it shows nothing


Block: TypeAlias = "Head | Section | Title | Line | FactLines | Table | Bar | Listing | Points | Picture | Fold"


def said(blocks: Iterable[Block], where: Host) -> Iterator[Block]:
    """Yield blocks as they are said to a host; their texts are plain strings then."""
    return (_said(block, where) for block in blocks)


def _said(shown: Any, where: Host) -> Any:
    if isinstance(shown, Text):
        return form(shown, where)
    if isinstance(shown, tuple):
        return tuple(_said(each, where) for each in shown)
    if is_dataclass(shown) and not isinstance(shown, type):
        return replace(shown, **{each.name: _said(getattr(shown, each.name), where) for each in fields(shown)})
    return shown


# --- The columns of a table that are shown, cleaned, the same for every back end.


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a table with at least one word in them."""

    names: tuple[str, ...]  # their headings, none in a list of steps
    rows: list[tuple[str, ...]]  # cleaned cells
    figures: frozenset[int]  # places of the columns of numbers among those shown
    code: frozenset[int]  # places of names and commands
    chips: frozenset[int]  # places of warnings in a word


def shown_columns(table: Table) -> Columns:
    """Return the columns of a table that are shown."""
    last = max((len(row.cells) for row in table.rows), default=len(table.names)) - 1
    kept = [place for place in range(last + 1) if any(row.cells[place] for row in table.rows)]
    kept = kept or [0]
    widths = [SENTENCE if place == last else table.widest for place in kept]
    rows = [
        tuple(clean(row.cells[place], width, is_name=place in table.code) for place, width in zip(kept, widths, strict=True))
        for row in table.rows
    ]
    figures, code, chips = (
        frozenset(number for number, place in enumerate(kept) if place in places)
        for places in (table.figures, table.code, table.chips)
    )
    names = tuple(table.names[place] for place in kept) if table.names else ()
    return Columns(names=names, rows=rows, figures=figures, code=code, chips=chips)


_CSS = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
_STYLE = style_sheet(_CSS)
_COLOUR = re.compile(r"--\w+: #\w+;")


def blocks_html(blocks: Iterable[Block], label: str, where: Host = "notebook") -> Html:
    """Return blocks as a whole result for a host; `label` names it for readers who cannot see it."""
    body = join(map(_block, said(blocks, where)))
    return join((_STYLE, tag("div", body, class_="nbguard", role="region", aria_label=label)))


def palette() -> tuple[str, str]:
    """Return the colours of parts and holders as declarations of CSS, for light and for dark."""
    light, dark = _CSS.split("[data-jp-theme-light=false]", 1)
    return "".join(_COLOUR.findall(light)), "".join(_COLOUR.findall(dark.split("}", 1)[0]))


def key(*entries: tuple[str, str, str], note: str = "") -> Html:
    """Return the key of a picture: (colour, name, figure) of each entry, and a note on the picture."""
    words = (_entry(colour, clean(name), figure) for colour, name, figure in entries)
    return tag("div", *_apart(*words, *([tag("span", note)] if note else [])), class_="key")


def _entry(colour: str, name: str, figure: str, hint: str = "") -> Html:
    shown = [Html(" "), tag("b", figure)] if figure else []
    return tag("span", tag("i", style=f"background:var(--{colour})" if colour else None), name, *shown, title=hint)


def _block(block: Block) -> Html:
    match block:
        case Head():
            return _head(block)
        case Section(name, what, figures):
            right = tag("span", clean(figures), class_="right")
            return tag("div", *_apart(tag("b", clean(name)), tag("span", clean(what), class_="dim"), right), class_="head")
        case Title(sentence, tone) | Line(sentence, tone):
            return _line(sentence, tone)
        case FactLines(rows):
            cells = (_row(tag("span", word, class_="dim"), _words(sentence)) for word, sentence in rows)
            return tag("table", tag("tbody", *cells), class_="facts")
        case Table():
            return _table(block)
        case Bar():
            return _bar(block)
        case Listing():
            return _listing(block)
        case Points():
            return _points(block)
        case Picture(html):
            return html
        case Fold(name, blocks):
            return tag("details", tag("summary", name), *map(_block, blocks))


def _words(sentence: str) -> Html:
    return with_code(clean(sentence))


def _line(sentence: str, tone: Tone) -> Html:
    words = _words(sentence)
    return tag("div", tag("b", words) if tone == "strong" else words, class_="dim" if tone == "dim" else None)


def _head(head: Head) -> Html:
    ending = clean(head.ending)
    ended = join((tag("span", "partial", class_="chip"), f" {ending}")) if head.warns else tag("span", ending, class_="dim")
    title = tag("b", clean(head.title, NAME))
    return tag("div", *_apart(title, tag("span", ended), tag("span", head.figures, class_="right")), class_="head")


def _apart(*parts: Html) -> Iterable[Html]:
    """Return parts with blanks between them: JupyterLab strips the style sheet of a notebook that it does not trust."""
    return (each for part in parts for each in (Html(" "), part))


def _row(*cells: Html, figures: frozenset[int] = frozenset(), kind: str = "", hint: str = "") -> Html:
    shown = (tag("td", cell, class_="n" if place in figures else None) for place, cell in enumerate(cells))
    return tag("tr", *shown, class_=kind, title=hint)


def _table(table: Table) -> Html:
    if not table.rows:
        return Html()
    shown = _rows_and_heads(table)
    return tag("details", tag("summary", table.fold), shown) if table.fold else shown


def _rows_and_heads(table: Table) -> Html:
    columns = shown_columns(table)
    is_measured = any(row.share is not None for row in table.rows)
    rows = (_table_row(row, cells, columns, is_measured) for row, cells in zip(table.rows, columns.rows, strict=True))
    body = tag("tbody", *rows)
    if not table.names:
        is_tree = any(row.rails for row in table.rows)
        return tag("table", body, class_="tree" if is_tree else "steps")
    names, figures = columns.names, columns.figures
    if is_measured:
        names, figures = (names[0], "", *names[1:]), _moved(figures)
    heads = (tag("th", name, scope="col", class_="n" if place in figures else None) for place, name in enumerate(names))
    shown = tag("table", tag("thead", tag("tr", *heads)), body)
    return shown if is_measured else tag("div", shown, class_="narrow")


def _moved(places: frozenset[int]) -> frozenset[int]:
    """Return the places of columns behind the one of the bars, which is the second."""
    return frozenset(place + 1 for place in places)


def _table_row(row: TableRow, cells: tuple[str, ...], columns: Columns, is_measured: bool) -> Html:
    shown = [_cell(cell, place, columns) if row.kind != "sum" else Html(cell) for place, cell in enumerate(cells)]
    if row.rails:
        shown[0] = join((tag("span", row.rails, class_="rails", aria_hidden="true"), shown[0]))
    figures = columns.figures
    if is_measured:
        shown.insert(1, Html() if row.share is None else _meter(row.share, row.colour))
        figures = _moved(figures)
    return _row(*shown, figures=figures, kind=row.kind, hint=clean(row.hint))


def _cell(cell: str, place: int, columns: Columns) -> Html:
    if place in columns.chips and cell:
        return tag("span", cell, class_="chip")
    return tag("code", cell) if place in columns.code and cell else with_code(cell)


def _meter(share: float, colour: str) -> Html:
    return tag("span", tag("i", style=f"width:{100 * share:.1f}%;background:var(--{colour})"), class_="meter")


def _bar(bar: Bar) -> Html:
    whole = bar.whole or sum(max(0, part.amount) for part in bar.slices) or 1
    cells = (_stretch(part, whole) for part in bar.slices if part.colour)
    keys = (_entry(part.colour, clean(part.name, NAME), part.figure, clean(part.note)) for part in bar.slices)
    name = tag("div", bar.name, class_="dim") if bar.name else Html()
    label = bar.label or f"{bar.name}: the figures are below"
    return join(
        (name, tag("div", *cells, class_="bar", role="img", aria_label=label), tag("div", *_apart(*keys), class_="key"))
    )


def _stretch(part: Slice, whole: int) -> Html:
    return tag("i", style=f"width:{100 * min(max(0, part.amount) / whole, 1):.3f}%;background:var(--{part.colour})")


def _listing(listing: Listing) -> Html:
    title = tag("div", listing.title, class_="title") if listing.title else Html()
    items = [tag("li", _words(sentence)) for sentence in listing.sentences]
    return join((title, tag("ol" if listing.is_numbered else "ul", *items) if items else Html()))


def _points(points: Points) -> Html:
    title = tag("div", points.title, class_="title") if points.title else Html()
    numbers = range(1, len(points.points) + 1)
    rows = (_point(point, number if points.is_numbered else None) for number, point in zip(numbers, points.points, strict=True))
    return join((title, tag("table", tag("tbody", *rows), class_="points")))


def _point(point: Point, number: int | None) -> Html:
    word = tag("span", point.word, class_="chip" if point.warns else "dim")
    lines = (tag("div", _words(line), class_="dim") for line in point.lines)
    return _row(word if number is None else join((f"{number}. ", word)), join((_words(point.what), *lines)))
