"""The comparison of two runs as blocks, with the most likely cause, then every difference."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.render.blocks import Block, Line, Listing, Table, TableRow, Title
from nbguard.training.runs.analysis.comparison import RunComparison, RunDifference


def comparison_blocks(comparison: RunComparison) -> Iterator[Block]:
    """Yield the sentence, the two runs, the table and the parts that were not compared."""
    yield Title(comparison.sentence, "strong")
    yield Line(f"{comparison.before} → {comparison.after}", "dim")
    if comparison.differences:
        names = ("", "difference", "first run", "second run", "follows from")
        yield Table(rows=tuple(map(_row, comparison.differences)), names=names, chips=(0,), code=(2, 3))
    if comparison.notes:
        yield Listing(sentences=comparison.notes)


def _row(difference: RunDifference) -> TableRow:
    what = f"{difference.topic}, {difference.name}"
    return TableRow(cells=(difference.effect, what, difference.before, difference.after, difference.follows))
