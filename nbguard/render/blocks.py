"""Blocks of words and figures that every result is made of, the same for text and HTML. Nothing in them is escaped.

A back end (`text`, `html`) knows the blocks and no result; a result's view knows its blocks and no back end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias

from nbguard.render.markup import Html
from nbguard.render.words import NAME, SENTENCE, clean
from nbguard.texts import Host, Text, form

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
