"""The history of cells as blocks, per device a picture and the table of the cells that changed its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nbguard.memory.reports.cell_ledger import CellRecord, DeviceChange, History
from nbguard.memory.reports.cell_lines import shares_text
from nbguard.memory.reports.history_chart import history_chart
from nbguard.render.blocks import Block, Picture, Section, Table, TableRow, Title
from nbguard.texts import BEHIND_MORE
from nbguard.units import format_bytes, format_column, unit_of

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_WIDE = 72
_NAMES = ("", "change", "allocated", "reserved", "peak in it", "what")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One row of the table: its changes down the column add up to the last `allocated`."""

    cell: str  # its number, or words in place of one
    change: int  # bytes that came (negative: went)
    allocated: int | None  # bytes after it
    reserved: int | None = None  # bytes after it, where an allocator counts them
    peak: str = ""  # the most while the cell ran, in words
    what: str = ""  # the holders that came and went
    is_cell: bool = False  # a cell's own row


def history_blocks(history: History, limit: int = 12) -> Iterator[Block]:
    """Yield per device a sentence, a picture, and the last `limit` cells that changed its memory."""
    if not history.devices:
        yield Title("no cell has used memory on a device since recording began", "dim")
    for device in history.devices:
        changes = history.of(device)
        yield Section(device, figures=_summary(changes))
        yield Picture(history_chart(device, changes), (f"  {_sparks([change.after for _, change in changes])}",))
        yield _table(_entries(changes, limit))


def _summary(changes: Sequence[tuple[CellRecord, DeviceChange]]) -> str:
    """Return the history of one device in a sentence."""
    first, (last, now) = changes[0][0], changes[-1]
    highest, cell = max((max(change.after, change.peak or 0), record.cell) for record, change in changes)
    cells = f"In[{first.cell}] to In[{last.cell}]" if len(changes) > 1 else f"In[{first.cell}]"
    return f"{cells} · now {format_bytes(now.after)} · highest known {format_bytes(highest)} (In[{cell}])"


def _entries(changes: Sequence[tuple[CellRecord, DeviceChange]], limit: int) -> Iterator[_Entry]:
    """Yield a device's rows: the bytes there were, the last `limit` cells that changed them, the bytes there are."""
    first, now = changes[0][1], changes[-1][1]
    changed = [(record, change) for record, change in changes if change.is_changed or record.stale]
    earlier, shown = changed[:-limit], changed[-limit:]
    before = first.before - first.between
    yield _Entry(cell=f"before In[{changes[0][0].cell}]", change=before, allocated=before)
    if earlier:
        total = sum(change.delta for _, change in earlier)
        cells = ("cell" if len(earlier) == 1 else "cells") + BEHIND_MORE
        yield _Entry(cell=f"{len(earlier)} earlier", change=total, allocated=earlier[-1][1].after, what=cells)
    for record, change in shown:
        yield _Entry(
            cell=f"In[{record.cell}]",
            change=change.delta,
            allocated=change.after,
            reserved=change.reserved,
            peak=_peak(change),
            what=_what(record),
            is_cell=True,
        )
    outside = now.after - before - sum(change.delta for _, change in changed)
    if outside:
        words = "by widgets' callbacks, threads, or before a cell began"
        yield _Entry(cell="outside cells", change=outside, allocated=None, what=words)
    yield _Entry(cell="now", change=now.after, allocated=now.after, reserved=now.reserved)


def _peak(change: DeviceChange) -> str:
    if change.peak is not None:
        return format_bytes(change.peak)
    return f"≤ {format_bytes(change.limit)}" if change.limit is not None else ""


def _what(record: CellRecord) -> str:
    words = ["failed"] if record.raised else []
    for word, shares in (("+", record.came), ("−", record.went), ("stale:", record.stale)):
        if text := shares_text(shares):
            words.append(f"{word} {text}")
    return " · ".join(words)


def _table(entries: Iterable[_Entry]) -> Table:
    """Return the table of a device; the changes add up to the last of `allocated`."""
    rows = tuple(entries)
    unit = unit_of(max(row.allocated or 0 for row in rows))
    of_changes = unit_of(max((abs(row.change) for row in rows if row.is_cell), default=unit[0]))
    changes = [figure.replace("-", "−") for figure in format_column([row.change for row in rows[:-1]], of_changes)]
    columns = (
        [row.cell for row in rows],
        [*_signed(changes, rows), ""],
        [_figure(row.allocated, unit) for row in rows],
        [_figure(row.reserved, unit) for row in rows],
        [row.peak for row in rows],
        [row.what for row in rows],
    )
    *above, last = zip(*columns, strict=True)
    shown = (*(TableRow(cells=cells) for cells in above), TableRow(cells=last, kind="sum"))
    return Table(names=_NAMES, rows=shown, figures=range(1, len(_NAMES) - 1))


def _signed(figures: Sequence[str], rows: Sequence[_Entry]) -> Iterator[str]:
    for place, (figure, row) in enumerate(zip(figures, rows, strict=False)):
        yield f"+{figure}" if row.change > 0 and place else figure


def _figure(value: int | None, unit: tuple[int, str]) -> str:
    return "" if value is None else format_column([value], unit)[0]


def _sparks(values: Sequence[int]) -> str:
    """Return bytes over cells as a line of blocks; of many cells, each block is the highest of a few."""
    step = -(-len(values) // _SPARKS_WIDE)
    highest = max(values) or 1
    tops = [max(values[at : at + step]) for at in range(0, len(values), step)]
    return "".join(_SPARKS[min(7, top * 8 // highest)] if top else " " for top in tops)
