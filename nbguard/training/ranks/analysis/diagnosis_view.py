"""A diagnosis of ranks as blocks, with the cause, other findings, then the place of each rank."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.render.blocks import Block, Line, Point, Points, Table, TableRow, Title
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis, RankFault, RankPlace
from nbguard.units import counted

_MOST_ROWS = 256
"""Ranks of a table; of a larger job unknown ones are left out first."""


def rank_blocks(diagnosis: RankDiagnosis) -> Iterator[Block]:
    """Yield the faults with their evidence and remedy, and a table of the ranks."""
    if diagnosis.faults:
        yield Title(f"{diagnosis.world} ranks: {diagnosis.faults[0].kind}", "strong")
        yield Points(tuple(map(_point, diagnosis.faults)))
    else:
        yield Line(diagnosis.sentence)
    places = diagnosis.places
    if len(places) > _MOST_ROWS:
        places = tuple(place for place in places if place.state != "unknown")[:_MOST_ROWS]
    yield Table(
        rows=tuple(map(_row, places)),
        names=("rank", "state", "calls", "waits in", "is at"),
        figures=(0, 2),
    )
    if len(places) < len(diagnosis.places):
        yield Line(f"{counted(len(diagnosis.places) - len(places), 'rank')} more are not shown")


def _point(fault: RankFault) -> Point:
    remedy = (f"→ {fault.remedy}",) if fault.remedy else ()
    return Point(word=fault.kind, what=fault.what, lines=(*fault.evidence, *remedy), warns=True)


def _row(place: RankPlace) -> TableRow:
    waits = place.waits_in.replace("`", "")
    return TableRow(cells=(str(place.rank), place.state, str(place.calls or ""), waits, place.stands))
