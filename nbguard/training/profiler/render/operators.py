"""The operators of a fit that take most time, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.render.blocks import Block, FactLines, Table, TableRow
from nbguard.training.profiler.analysis.operators import OperatorTable
from nbguard.units import counted, format_time


def operator_blocks(table: OperatorTable | None) -> Iterator[Block]:
    """Yield the table, and a note on it; nothing where it was not asked for."""
    if table is None:
        return
    if table.rows:
        yield _rows(table)
    if table.note:
        yield FactLines((("operators", table.note),))


def _rows(table: OperatorTable) -> Table:
    batches = max(table.batches, 1)
    whole = table.device or table.cpu or 1
    rows = []
    for row in table.rows:
        name = row.name.removeprefix("aten::") + (" (backward)" if row.is_backward else "")
        share = (row.device if table.device else row.cpu) / whole
        times = [format_time(row.cpu // batches)]
        if table.device:
            times.insert(0, format_time(row.device // batches))
        calls = f"{row.calls / batches:.3g}"
        rows.append(TableRow(cells=(name, *times, f"{share:.0%}", calls, row.module, row.site)))
    columns = ("on the GPU", "on the CPU") if table.device else ("on the CPU",)
    title = f"operators by their own time, of {counted(table.batches, 'batch', 'batches')}"
    figures = tuple(range(1, len(columns) + 3))
    return Table(names=(title, *columns, "share", "calls", "module", "line"), rows=tuple(rows), figures=figures)
