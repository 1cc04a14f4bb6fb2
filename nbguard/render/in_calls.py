"""Blocks with calls of Python for commands, for where there are no magics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from nbguard.calls import as_calls, call_of
from nbguard.render.blocks import Block, Table
from nbguard.render.markup import Html


def in_calls(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield blocks with calls for commands, in every sentence and cell of a table."""
    return map(_rewritten, blocks)


def _rewritten(shown: Any) -> Any:
    if isinstance(shown, Html):
        return shown
    if isinstance(shown, Table):
        rows = (replace(row, cells=tuple(_cells(row.cells, shown.code))) for row in shown.rows)
        return replace(shown, rows=tuple(rows), brief=_rewritten(shown.brief))
    if isinstance(shown, str):
        return as_calls(shown)
    if isinstance(shown, tuple):
        return tuple(map(_rewritten, shown))
    if is_dataclass(shown) and not isinstance(shown, type):
        return replace(shown, **{each.name: _rewritten(getattr(shown, each.name)) for each in fields(shown)})
    return shown


def _cells(cells: Iterable[str], code: Collection[int]) -> Iterator[str]:
    """Yield the cells of a row; in a column of code a command stands alone, without a mark at its end."""
    for place, cell in enumerate(cells):
        call = call_of(cell) if place in code and cell.startswith("%") else ""
        yield call or as_calls(cell)
