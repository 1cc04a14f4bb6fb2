"""What a long report is made of: blocks of words and figures, the same for text and HTML. Nothing in them is escaped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Head:
    """The first line: what the report is about, how it ended, its figures. `warns` if there is more to the ending than that."""

    title: str
    ending: str
    figures: str
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Sentences under a word each."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. `group` stands above those that make it up, which are `part` of it; `sum` below all."""

    cells: tuple[str, ...]
    kind: Literal["", "group", "part", "sum"] = ""
    share: float | None = None  # of the whole, 0…1: as a bar, where there are pictures
    colour: str = "used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the columns at the places `figures` are numbers, those that say nothing are left out.

    With `fold` it lies behind these words in a notebook, and in a terminal `brief` stands for it.
    """

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    figures: Collection[int] = ()
    fold: str = ""
    brief: Facts | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole, with its figure."""

    name: str
    figure: str
    amount: int
    colour: str


@dataclass(frozen=True, slots=True)
class Parts:
    """A whole as its parts side by side."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Sentences below one another, numbered or not."""

    title: str
    sentences: tuple[str, ...]
    is_numbered: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """Something that stands out: in a word how much it matters, what it is, and lines that say more."""

    word: str
    what: str
    lines: tuple[str, ...]
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Points:
    """Points below one another."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as HTML, which is escaped already. A terminal shows none."""

    html: str


Block = Head | Facts | Table | Parts | Listing | Points | Picture

NAME = 60
"""Characters of a name that are shown, and of a cell in a table but for the last, which may be a sentence."""
SENTENCE = 500


def clean(text: str, limit: int = SENTENCE) -> str:
    """Return text as it can be shown anywhere: cut, in one line, without what steers a terminal or the reading direction."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(character if character.isprintable() else " " for character in shown)


def told(table: Table) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[int]]:
    """Return the names, rows and figures' places of the columns of a table that say something."""
    kept = [place for place in range(len(table.names)) if any(row.cells[place] for row in table.rows)]
    last = len(table.names) - 1
    rows = [tuple(clean(row.cells[place], SENTENCE if place == last else NAME) for place in kept) for row in table.rows]
    figures = [number for number, place in enumerate(kept) if place in table.figures]
    return tuple(table.names[place] for place in kept), rows, figures
