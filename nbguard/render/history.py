"""The history of cells as text, and as HTML with a picture: inline SVG in the colours of the host's theme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from nbguard.render.chart import chart
from nbguard.render.elements import columns, head_line, page, table_row
from nbguard.render.ledger import shares_text
from nbguard.reports.cell_ledger import CellRecord, DeviceChange, History
from nbguard.units import format_bytes, format_column, unit_of

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_WIDE = 72
_EMPTY = "no cell has used memory on a device since recording began"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One row of the table: its changes down the column re-add to the last `allocated`."""

    cell: str
    change: int
    allocated: int | None
    reserved: int | None = None
    peak: str = ""
    what: str = ""


def history_text(history: History, limit: int = 12) -> str:
    """Return the history as text: per device a line, a small picture, and the last `limit` cells that changed its memory."""
    lines: list[str] = []
    for device in history.devices:
        found = history.of(device)
        lines += [f"{device}  {summary(found)}", f"  {_sparks([each.after for _, each in found])}", ""]
        lines += [*_aligned(_cells(_table(found, limit))), ""]
    return "\n".join(lines).rstrip() if lines else _EMPTY


def history_html(history: History, limit: int = 12) -> str:
    """Return the history as HTML: per device a picture and the same table."""
    body = ""
    for device in history.devices:
        found = history.of(device)
        head, *rows = _cells(_table(found, limit))
        figures = range(1, len(head) - 1)
        cells = "".join(table_row(*map(escape, row), numbers=figures) for row in rows[:-1])
        cells += table_row(*map(escape, rows[-1]), numbers=figures, row='tr class="sum"')
        body += head_line(device, "", escape(summary(found))) + chart(device, found) + columns(head, figures, cells)
    return page(body or f'<div class="dim">{_EMPTY}</div>')


def summary(found: Sequence[tuple[CellRecord, DeviceChange]]) -> str:
    """Return the history of one device in a sentence."""
    first, (last, now) = found[0][0], found[-1]
    highest, record = max((max(each.after, each.peak or 0), record.cell) for record, each in found)
    cells = f"In[{first.cell}] to In[{last.cell}]" if len(found) > 1 else f"In[{first.cell}]"
    return f"{cells} · now {format_bytes(now.after)} · highest known {format_bytes(highest)} (In[{record}])"


def _table(found: Sequence[tuple[CellRecord, DeviceChange]], limit: int) -> list[_Line]:
    """Return the lines of a device's table: what there was, the last `limit` cells that changed it, what there is."""
    first = found[0][1]
    changed = [(record, each) for record, each in found if _says(record, each)]
    earlier, shown = changed[:-limit], changed[-limit:]
    lines = [
        _Line(
            cell=f"before In[{found[0][0].cell}]", change=first.before - first.between, allocated=first.before - first.between
        )
    ]
    if earlier:
        s = "s" if len(earlier) > 1 else ""
        total = sum(each.delta for _, each in earlier)
        lines.append(
            _Line(cell=f"{len(earlier)} earlier", change=total, allocated=earlier[-1][1].after, what=f"cell{s} (-n shows more)")
        )
    lines += [
        _Line(
            cell=f"In[{record.cell}]",
            change=each.delta,
            allocated=each.after,
            reserved=each.reserved,
            peak=_peak(each),
            what=_what(record),
        )
        for record, each in shown
    ]
    now = found[-1][1]
    outside = now.after - sum(line.change for line in lines)
    if outside:
        lines.append(
            _Line(
                cell="outside cells",
                change=outside,
                allocated=None,
                what="by widgets' callbacks, threads, or before a cell began",
            )
        )
    return [*lines, _Line(cell="now", change=now.after, allocated=now.after, reserved=now.reserved)]


def _says(record: CellRecord, each: DeviceChange) -> bool:
    return bool(each.is_changed or record.stale)


def _peak(each: DeviceChange) -> str:
    if each.peak is not None:
        return format_bytes(each.peak)
    return f"≤ {format_bytes(each.limit)}" if each.limit is not None else ""


def _what(record: CellRecord) -> str:
    words = ["failed"] if record.raised else []
    for word, shares in (("+", record.came), ("−", record.went), ("stale:", record.stale)):
        if text := shares_text(shares):
            words.append(f"{word} {text}")
    return " · ".join(words)


def _cells(lines: Sequence[_Line]) -> list[list[str]]:
    """Return the table in words and figures, its heading first; columns that say nothing are left out."""
    unit = unit_of(max(line.allocated or 0 for line in lines))
    of_changes = unit_of(max((abs(line.change) for line in lines if line.cell.startswith("In[")), default=unit[0]))
    changes = [figure.replace("-", "−") for figure in format_column([line.change for line in lines[:-1]], of_changes)]
    columns = [
        ["", *(line.cell for line in lines)],
        ["change", *_signed(changes, lines), ""],
        ["allocated", *_figures((line.allocated for line in lines), unit)],
        ["reserved", *_figures((line.reserved for line in lines), unit)],
        ["peak in it", *(line.peak for line in lines)],
        ["what", *(line.what for line in lines)],
    ]
    kept = [column for column in columns if any(column[1:])]
    if not any(columns[-1][1:]):
        kept.append(columns[-1])
    return [list(row) for row in zip(*kept, strict=True)]


def _signed(figures: Sequence[str], lines: Sequence[_Line]) -> Iterator[str]:
    for place, (figure, line) in enumerate(zip(figures, lines, strict=False)):
        yield f"+{figure}" if line.change > 0 and place else figure


def _figures(values: Iterator[int | None], unit: tuple[int, str]) -> Iterator[str]:
    for value in values:
        yield "" if value is None else format_column([value], unit)[0]


def _aligned(table: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    for name, *figures, what in table:
        middle = "  ".join(f"{cell:>{width}}" for cell, width in zip(figures, widths[1:-1], strict=True))
        yield f"  {name:<{widths[0]}}  {middle}  {what}".rstrip()


def _sparks(values: Sequence[int]) -> str:
    """Return bytes over cells as a line of blocks; of many cells, each block is the highest of a few."""
    step = -(-len(values) // _SPARKS_WIDE)
    highest = max(values) or 1
    tops = [max(values[at : at + step]) for at in range(0, len(values), step)]
    return "".join(_SPARKS[min(7, top * 8 // highest)] if top else " " for top in tops)
