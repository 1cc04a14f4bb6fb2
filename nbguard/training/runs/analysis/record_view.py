"""A record of a run as blocks, telling whether its seeds are set, then a line or a table for each topic, and the cells."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core import advice
from nbguard.render.blocks import Block, FactLines, Line, Section, Table, TableRow, Title
from nbguard.render.words import clip
from nbguard.training.runs.analysis.record import NEVER_SET, TOPICS, RunCell, RunRecord
from nbguard.units import counted

_LINE = 90
"""Characters of a line of code, and of a topic's facts in text."""


def record_blocks(record: RunRecord) -> Iterator[Block]:
    """Yield the verdict, how much is known, then every topic: in text a line each, in HTML a table behind one."""
    yield Title(_verdict(record), "strong")
    known = f"{counted(len(record.facts), 'fact')}, {len(record.missing)} not known"
    yield Line(f"{record.subject or 'this process'} · {record.time} · {known} · {record.seconds:.2g} s", "dim")
    for topic in TOPICS:
        facts = record.of(topic)
        if facts:
            words = clip(" · ".join(f"{name} {value}" for name, value in facts.items()), _LINE)
            rows = tuple(TableRow(cells=fact) for fact in facts.items())
            fold = f"{topic}, {counted(len(rows), 'fact')}"
            yield Table(rows=rows, code=(1,), fold=fold, brief=FactLines(((topic, words),)))
    if record.missing:
        rows = tuple(TableRow(cells=(f"{each.topic}, {each.name}", each.reason)) for each in record.missing)
        names = clip(", ".join(f"{each.topic} ({each.name})" for each in record.missing), _LINE)
        yield Table(rows=rows, fold=f"{len(rows)} not known", brief=FactLines((("not known", names),)))
    if record.cells:
        yield Section("cells", figures=counted(len(record.cells), "cell"))
        yield Table(rows=tuple(map(_row, record.cells)), code=(2,))
    if record.diff:
        yield Section("changes since the commit", figures=counted(len(record.diff.splitlines()), "line"))


def _verdict(record: RunRecord) -> str:
    """Return whether the record has seeds, the beginning of a repetition."""
    seeds = record.of("seeds")
    calls = seeds.get("calls", "")
    if seeds.get("torch", NEVER_SET) != NEVER_SET:
        return f"PyTorch's seed is {seeds['torch']}; " + advice.diagnose().code + " shows whether a step repeats"
    if calls.startswith("none"):
        return "No seed is set, so this run cannot be repeated"
    return "PyTorch's seed is not set, so this run cannot be repeated" + (f" (set in cells: {calls})" if calls else "")


def _row(cell: RunCell) -> TableRow:
    lines = [line for line in cell.source.splitlines() if line.strip()]
    first = lines[0][:_LINE] if lines else ""
    edited = {"yes": "edited since", "no": ""}.get(cell.edited, "")
    return TableRow(cells=(f"In[{cell.number}]", cell.role, first + (" …" if len(lines) > 1 else ""), edited))
