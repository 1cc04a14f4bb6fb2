"""The result of a check of a job's ranks (findings, the cause first, and each rank's place), and its view as blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.html import Block, Line, Point, Points, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.training.ranks.analysis.facts import (
    JobFacts,
    RankFacts,
    RankFault,
    RankState,
    call_words,
    place_words,
    ranks_words,
)
from nbguard.units import counted


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


# --- Faults of ranks that ended by an error or a signal, the first as the cause, the others' errors as its echo.


_ECHO = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out|timed out|remote (process|worker)|application timeout"
    r"|communicator was aborted|DistBackendError|DistNetworkError|DistStoreError|SignalException|watchdog",
    re.IGNORECASE,
)
"""Errors of a rank that another one has let down."""
_UNUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def is_echo(error: str) -> bool:
    """Say whether an error is from a rank that waited for another in vain."""
    return bool(_ECHO.search(error))


def faults(job: JobFacts) -> Iterator[RankFault]:
    """Yield the first death or error, if there is one that is no echo."""
    events = [facts for facts in job.ranks if facts.state == "died" or (facts.state == "raised" and not is_echo(facts.error))]
    if not events:
        return
    first = min(events, key=lambda facts: (facts.at or float("inf"), _calls(facts)))
    alike = [facts for facts in events if _is_alike(facts, first)]
    later = [facts for facts in events if facts.state == "raised" and facts not in alike]
    evidence = [f"{_raised_at(facts)} after it: {facts.error}" for facts in later]
    echoes = [facts.rank for facts in job.ranks if facts.state == "raised" and facts not in events]
    if echoes:
        evidence.append(f"the error{'s' if len(echoes) > 1 else ''} of {ranks_words(echoes)} came after it, and of it")
    yield (
        _died(first, tuple(evidence))
        if first.state == "died"
        else _raised(first, [each.rank for each in alike], tuple(evidence))
    )


def _calls(facts: RankFacts) -> int:
    """Return how many calls a rank has made: of ranks that died, the others waited for the one with the fewest."""
    return max((call.position for call in facts.calls), default=0)


def _is_alike(one: RankFacts, other: RankFacts) -> bool:
    """Say whether two ranks raised the same error: its class at the same line. Its text may have numbers of the rank's own."""
    kinds = [(facts.state, facts.error.partition(":")[0], facts.error_place) for facts in (one, other)]
    return one is other or (one.state == "raised" and kinds[0] == kinds[1])


def _raised_at(facts: RankFacts) -> str:
    return f"rank {facts.rank} raised another error" + (f" at `{facts.error_place}`" if facts.error_place else "")


def _died(facts: RankFacts, evidence: tuple[str, ...]) -> RankFault:
    last = facts.calls[-1] if facts.calls else None
    words = "" if last is None else f"; its last call was {call_words(last)}{place_words(last)}"
    stands = f"it was at `{facts.stands}`"
    return RankFault(
        kind="died",
        ranks=(facts.rank,),
        collective="" if last is None else last.name,
        place=facts.stands or ("" if last is None else last.place),
        last_common=None,
        what=f"rank {facts.rank} died (its process {facts.pid} is gone){words}",
        evidence=(*((stands,) if facts.stands else ()), *evidence),
        remedy="read its own output; if there is none, it was killed, and `dmesg` shows whether the host ran out of memory",
    )


def _raised(facts: RankFacts, ranks: Sequence[int], evidence: tuple[str, ...]) -> RankFault:
    """Return the fault of the first error; `ranks`: all that raised the same."""
    words, is_alone = ranks_words(ranks), len(ranks) == 1
    at = f" at `{facts.error_place}`" if facts.error_place else ""
    if _UNUSED in facts.error:
        indices = _INDICES.search(facts.error)
        which = f": those numbered {indices[1].strip().replace(' ', ', ')} in `model.parameters()`" if indices else ""
        return RankFault(
            kind="unused parameters",
            ranks=tuple(ranks),
            collective="all_reduce",
            place=facts.error_place,
            last_common=None,
            what=f"{words} left parameters unused in the previous batch{at}, so DistributedDataParallel waits for"
            f" their gradients{which}",
            evidence=evidence,
            remedy="`DistributedDataParallel(model, find_unused_parameters=True)`, or use all in each loss on all ranks",
        )
    return RankFault(
        kind="raised",
        ranks=tuple(ranks),
        collective="",
        place=facts.error_place,
        last_common=None,
        what=f"{words} raised {'first' if is_alone else 'the same error'}{at}: {facts.error}",
        evidence=evidence,
        remedy=f"fix the error of {words}; the other ranks only waited for it" if is_alone else "fix the error on all of them",
    )
