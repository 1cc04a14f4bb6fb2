"""The result of a check of a job's ranks (findings, the cause first, and each rank's place), and its view as blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from nbguard.render.blocks import Block, Line, Point, Points, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.training.ranks.analysis.facts import RankState
from nbguard.units import counted

FaultKind: TypeAlias = Literal[
    "left out", "extra", "order", "type", "size", "dtype", "root or operation", "uneven batches", "unused parameters",
    "raised", "died", "ended", "slow", "stuck", "point to point", "same call", "rendezvous", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """One reason why ranks wait for each other, or ended."""

    kind: FaultKind
    ranks: tuple[int, ...]  # at fault; where two of two differ, both, unless one has plainly left something out
    collective: str  # the call that is waited for: "all_reduce"; empty if none is
    place: str  # the user's line of that call; of an error or a rank that is late: its own line
    last_common: int | None  # position of the last call that all have in common
    what: str  # the fault in one sentence
    evidence: tuple[str, ...] = ()  # sentences that it rests on
    remedy: str = ""  # what to do; code between backticks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank stands."""

    rank: int
    state: RankState
    calls: int  # collectives that it has called in the default group, as far as known
    waits_in: str  # the call that it waits in; empty if none
    stands: str  # the line of its main thread
    stack: tuple[str, ...] = ()  # all lines of its main thread that are known, innermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDiagnosis(Result):
    """The faults of a job's ranks, the cause first; without any, all ranks agree as far as they go."""

    kind: ClassVar[str] = "ranks"
    view: ClassVar[str] = "nbguard.training.ranks.analysis.diagnosis:rank_blocks"
    label: ClassVar[str] = "Ranks of a distributed job"

    world: int  # number of ranks of the job
    faults: tuple[RankFault, ...]  # the cause first
    places: tuple[RankPlace, ...]  # of each rank that has been heard of

    @property
    def sentence(self) -> str:
        """Return the cause in one sentence."""
        if self.faults:
            return self.faults[0].what
        return f"{self.world} ranks agree in all known calls"


# --- A diagnosis of ranks as blocks, with the cause, other findings, then the place of each rank.


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
