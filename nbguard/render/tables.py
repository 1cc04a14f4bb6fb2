"""The columns of a table that are shown, cleaned, the same for every back end."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.render.blocks import Table
from nbguard.render.words import SENTENCE, clean


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
