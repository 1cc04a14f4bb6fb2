"""The cause why ranks wait for each other, by one rule after another, the first that fits is the cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nbguard.training.ranks.analysis import absence_faults, agreement_faults, event_faults
from nbguard.training.ranks.analysis.alignment import GroupCalls, groups_of
from nbguard.training.ranks.analysis.diagnosis import FaultKind, RankDiagnosis, RankFault, RankPlace
from nbguard.training.ranks.analysis.facts import CollectiveCall, JobFacts, RankFacts
from nbguard.training.ranks.analysis.words import call_words, place_words

_ENDED_BY_IT = "fix the fault above first; gloo ends a process that receives more than it expects"


def diagnosed(job: JobFacts) -> RankDiagnosis:
    """Return the faults of a job's ranks, the cause first."""
    faults: list[RankFault] = []
    kept: list[tuple[FaultKind, frozenset[int]]] = []
    job = replace(job, ranks=tuple(map(_let_down, job.ranks)))
    for fault in _faults(job, groups_of(job)):
        if faults and fault.kind == "died":  # it may be of another fault, which stands before it
            fault = replace(fault, remedy=_ENDED_BY_IT)
        ranks = frozenset(fault.ranks)
        if not any(fault.kind == kind and ranks <= others for kind, others in kept):
            faults.append(fault)
            kept.append((fault.kind, ranks))
    if not faults:
        faults.extend(absence_faults.same_call(groups_of(job)))
    notes = tuple(f"NCCL's log of rank {facts.rank}: {note}" for facts in job.ranks for note in facts.nccl)
    if faults and notes:
        faults[0] = replace(faults[0], evidence=(*faults[0].evidence, *notes))
    return RankDiagnosis(world=job.world, faults=tuple(faults), places=tuple(map(_place, job.ranks)))


def _let_down(facts: RankFacts) -> RankFacts:
    """Return the facts of a rank, its last collective as one that waits where another rank's end broke it off.

    gloo's recorder counts a collective that failed among those that are complete. The line of a call that has none is the
    error's.
    """
    last = next((at for at in range(len(facts.calls) - 1, -1, -1) if not facts.calls[at].is_p2p), None)
    if last is None or facts.state != "raised" or not event_faults.is_echo(facts.error):
        return facts
    waits = replace(facts.calls[last], is_done=False)
    if not waits.place:
        waits = replace(waits, place=facts.error_place, caller=facts.error_caller)
    return replace(facts, calls=(*facts.calls[:last], waits, *facts.calls[last + 1 :]))


def _faults(job: JobFacts, groups: tuple[GroupCalls, ...]) -> Iterator[RankFault]:
    for group in groups:
        yield from agreement_faults.faults(job, group)
    yield from event_faults.faults(job)
    yield from absence_faults.point_to_point(job)
    for group in groups:
        yield from absence_faults.faults(job, group)


def _place(facts: RankFacts) -> RankPlace:
    waiting = outstanding(facts)
    return RankPlace(
        rank=facts.rank,
        state=facts.state,
        calls=max((call.position for call in facts.calls if not call.is_p2p and call.group in ("0", "")), default=0),
        waits_in="" if waiting is None else call_words(waiting) + place_words(waiting),
        stands=facts.stands,
        stack=facts.stack,
    )


def outstanding(facts: RankFacts) -> CollectiveCall | None:
    """Return the call that a rank waits in, or None without a known one."""
    return next((call for call in reversed(facts.calls) if not call.is_done), None)
