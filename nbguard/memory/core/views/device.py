"""A device's memory as blocks, with the bar of its parts, the table of its holders, the table of its pools."""

from __future__ import annotations

from collections.abc import Sequence

from nbguard.memory.core import advice
from nbguard.memory.core.breakdown import DevicePart, Part
from nbguard.memory.core.least_shown import least_of_rows
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.segments.pools import Pool
from nbguard.render.blocks import Bar, Slice, Table, TableRow
from nbguard.texts import BEHIND_MORE, Text
from nbguard.units import counted, format_bytes, format_column, unit_of

_COLOURS: dict[str, tuple[str, str]] = {
    DevicePart.CONTEXT: ("ctx", "█"),
    DevicePart.ALLOCATED: ("used", "█"),
    DevicePart.RELEASABLE: ("rel", "▒"),
    DevicePart.CACHED: ("rel", "▒"),
    DevicePart.STRANDED: ("strand", "▓"),
    DevicePart.GRAPH_POOLS: ("strand", "▓"),
    DevicePart.PENDING: ("strand", "▓"),
    DevicePart.FREE: ("", " "),
    DevicePart.SPILLED: ("", " "),  # the bar is the device, and it lies outside
}
"""The colour of each part of a device, and its character in a terminal; all others share one."""
_OTHER = ("other", "░")
_ALWAYS_SHOWN = frozenset({DevicePart.ALLOCATED, DevicePart.FREE})
_HOLDER_NAMES = ("held by", "frees now", "reaches", "since", "", "what")
_OPENS = Text(advice.ALL_HOLDERS.command, "")
"""The command that shows all holders; a result of Python has them all."""
_POOLS_SHOWN = 8
_NAMED = 4
"""Holders whose names stand in one cell."""


def parts_bar(parts: Sequence[Part], whole: int | None = None, label: str = "") -> Bar:
    """Return the parts of a device as a bar; `whole` is its size, where that is known: a terminal draws it then, too.

    Empty parts are left out, but for allocated and free memory.
    """
    shown = [part for part in parts if part.nbytes or part.name in _ALWAYS_SHOWN]
    slices = []
    for part, figure in zip(shown, part_figures(shown), strict=True):
        colour, mark = _COLOURS.get(part.name, _OTHER)
        slices.append(Slice(name=part.label, figure=figure, amount=part.nbytes, colour=colour, mark=mark, note=part.note))
    return Bar(slices=tuple(slices), whole=whole, label=label, is_drawn_as_text=whole is not None)


def part_figures(parts: Sequence[Part]) -> list[str]:
    """Return the bytes of parts in the unit of their sum, so that the figures add up."""
    return format_column([part.nbytes for part in parts], unit_of(sum(part.nbytes for part in parts)))


def holder_rows(holders: Sequence[Holder], allocated: int, limit: int | None, opens: str = _OPENS) -> list[TableRow]:
    """Return at most `limit` rows, the rest in one, small holders in one, and the total: the figures add up to the total.

    Without a limit all have a row, the small ones too. `opens` is the command that does this.
    """
    least = 0 if limit is None else least_of_rows(holder.retained for holder in holders)
    large = [holder for holder in holders if holder.shown >= least]
    if len(holders) - len(large) == 1:
        large = list(holders)  # a line for one small holder alone would only hide its name
    shown, more = large[:limit], large[len(large) if limit is None else limit :]
    known = set(map(id, large))
    small = [holder for holder in holders if id(holder) not in known]
    unit = unit_of(allocated)
    sums = [sum(holder.retained for holder in rest) for rest in (more, small)]
    figures = format_column([*(holder.retained for holder in shown), *sums], unit)
    rows = [holder_row(holder, figure, unit) for holder, figure in zip(shown, figures, strict=False)]
    if more:
        names = ", ".join(holder.label for holder in more[:_NAMED]) + (", …" if len(more) > _NAMED else "")
        chip = stale_words(sum(holder.stale_bytes for holder in more), is_all=all(holder.stale for holder in more))
        rows.append(TableRow(cells=(f"{len(more)} more", figures[-2], "", "", chip, names + BEHIND_MORE)))
    if small:
        holding = counted(len(small), "small holder")
        rows.append(TableRow(cells=(holding, figures[-1], "", "", "", opens)))
    return [*rows, total_row(allocated)]


def total_row(allocated: int) -> TableRow:
    """Return the row below all holders."""
    return TableRow(cells=("allocated", *format_column([allocated], unit_of(allocated)), "", "", "", ""), kind="sum")


def holder_row(holder: Holder, figure: str, unit: tuple[int, str]) -> TableRow:
    """Return a holder's row: `figure` is the bytes that it frees, `unit` the unit of the column."""
    name = holder.path if holder.stale and holder.path else holder.label
    reaches = "" if holder.is_shared or not holder.roots else format_column([holder.reaches], unit)[0]
    since = f"In[{holder.cell}]" if holder.cell is not None else ""
    what = f"{_words_on(holder)} (at least)" if holder.at_least else _words_on(holder)
    cells = (name, figure, reaches, since, stale_words(holder.stale_bytes, is_all=holder.stale), what)
    return TableRow(cells=cells, hint=command_of(holder.names, holder.kind, holder.stale))


def _words_on(holder: Holder) -> str:
    """Return the words on a holder and on all that its release takes along, needed or stale."""
    line = holder.together
    if holder.is_shared:
        return f"shared, together {format_bytes(line.frees or 0)}  " + line.command if line.command else holder.what
    if line.command:
        others = ", ".join(holder.others[:_NAMED]) + (", …" if len(holder.others) > _NAMED else "")
        return f"with {others}: {format_bytes(line.frees or 0)} · {holder.what}"
    if line.effect:
        return f"{line.effect.replace('`', '')} · {holder.what}"
    if holder.frees > holder.retained:
        return f"with its stale memory: {format_bytes(holder.frees)} · {holder.what}"
    return holder.what


def stale_words(nbytes: int, *, is_all: bool) -> str:
    """Return the stale part of a row in words, that is, all of it, so many bytes of it, or nothing."""
    return "stale" if is_all else f"{format_bytes(nbytes)} stale" if nbytes else ""


def holder_table(rows: Sequence[TableRow]) -> Table:
    """Return rows of holders and their total as a table."""
    return Table(names=_HOLDER_NAMES, rows=tuple(rows), figures=(1, 2), code=(0,), chips=(4,))


def command_of(names: Sequence[str], kind: str, stale: bool) -> str:
    """Return the command that releases a holder by these of its names; empty where there is none."""
    if stale:
        return advice.release_stale().command
    return advice.release_names(names).command if kind in ("name", "out") else ""


def pool_table(pools: Sequence[Pool]) -> Table | None:
    """Return the allocator's pools as a table with its total; None where nothing is free in any.

    The columns between `reserved` and `largest free` add up to it along a row, every one to its total down the column.
    """
    spaces = [pool.space for pool in pools]
    if all(space.reserved == space.allocated for space in spaces):
        return None
    shown = {pool.name: [pool.space] for pool in pools[:_POOLS_SHOWN]}
    if rest := spaces[_POOLS_SHOWN:]:
        shown[f"{len(rest)} more"] = rest
    parts = {name: name for name in ("reserved", "allocated", "releasable", "stranded")}
    rare = {"kept": "graph pools", "pending": "pending"}
    parts |= {name: title for name, title in rare.items() if any(getattr(space, name) for space in spaces)}
    unit = unit_of(max(space.reserved for space in spaces))
    columns: list[list[str]] = []
    for name in parts:
        amounts = [sum(getattr(space, name) for space in group) for group in shown.values()]
        columns.append([*format_column(amounts, unit), *format_column([sum(amounts)], unit)])
    largest = [max(space.largest_free for space in group) for group in shown.values()]
    columns.append([*(format_column([nbytes], unit)[0] for nbytes in largest), ""])
    *rows, total = zip([*shown, "all pools"], *columns, strict=True)
    return Table(
        names=("cache", *parts.values(), "largest free"),
        rows=(*(TableRow(cells=cells) for cells in rows), TableRow(cells=total, kind="sum")),
        figures=range(1, len(parts) + 2),
        fold="the cache, by pool and stream",
    )
