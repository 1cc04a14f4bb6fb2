"""A record of a run as blocks: a table for each topic, the cells, and what is not known with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.render.blocks import Block, Listing, Section, Table, TableRow, Title
from nbguard.runs.analysis.record import TOPICS, RunCell, RunRecord
from nbguard.units import counted

_SHOWN = 12
"""Rows of a topic that stand open; the others are in the record itself."""
_LINE = 90


def record_blocks(record: RunRecord) -> Iterator[Block]:
    """Yield how much is known, then every topic."""
    known = f"{counted(len(record.facts), 'fact')}, {len(record.missing)} not known"
    yield Title(f"{record.subject or 'This process'} · {record.time} · {known} · {record.seconds:.2g} s", "strong")
    for topic in TOPICS:
        rows = [fact for fact in record.facts if fact.topic == topic]
        if rows:
            yield Section(topic, figures=counted(len(rows), "fact"))
            yield Table(rows=tuple(TableRow(cells=(fact.name, fact.value)) for fact in rows[:_SHOWN]), code=(1,))
        if len(rows) > _SHOWN:
            yield Listing(sentences=(f"and {len(rows) - _SHOWN} more",), mark="…")
    if record.cells:
        yield Section("cells", figures=counted(len(record.cells), "cell"))
        yield Table(rows=tuple(map(_row, record.cells)), code=(2,))
    if record.diff:
        yield Section("changes since the commit", figures=counted(len(record.diff.splitlines()), "line"))
    if record.missing:
        yield Listing(
            title="Not known",
            sentences=tuple(f"{each.topic}, {each.name}: {each.reason}" for each in record.missing),
        )


def _row(cell: RunCell) -> TableRow:
    lines = [line for line in cell.source.splitlines() if line.strip()]
    first = lines[0][:_LINE] if lines else ""
    edited = {"yes": "edited since", "no": ""}.get(cell.edited, "")
    return TableRow(cells=(f"In[{cell.number}]", cell.role, first + (" …" if len(lines) > 1 else ""), edited))
