"""The cause why ranks wait for each other or for absent ones, by one rule after another, the first that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nbguard.training.ranks.analysis import agreement_faults
from nbguard.training.ranks.analysis import diagnosis as event_faults
from nbguard.training.ranks.analysis.agreement_faults import JOIN, GroupCalls, groups_of
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis, RankPlace
from nbguard.training.ranks.analysis.facts import (
    CollectiveCall,
    FaultKind,
    JobFacts,
    RankFacts,
    RankFault,
    call_at,
    call_words,
    place_words,
    ranks_words,
    stands_words,
    wait,
)

# --- Faults of ranks that have not come to a call where others wait for them.


def faults(job: JobFacts, group: GroupCalls) -> Iterator[RankFault]:
    """Yield the ranks that others wait for, by the reason why they have not come."""
    position = group.last
    made = {rank: call for rank, call in group.at(position).items() if call is not None}
    missing = [job.ranks[rank] for rank, call in group.at(position).items() if call is None]
    if not made or not missing or all(call.is_done for call in made.values()):
        return
    waited = next(iter(made.values()))
    last = max((max(group.calls[facts.rank], default=0) for facts in missing), default=0)
    last = min(last, position - 1)
    reasons: dict[FaultKind, list[RankFacts]] = {}
    for facts in missing:
        reasons.setdefault(_reason(facts, group), []).append(facts)
    for kind, late in sorted(reasons.items(), key=lambda each: _ORDER.index(each[0])):
        yield _absent(kind, late, sorted(made), waited, last or None)


_ORDER: tuple[FaultKind, ...] = ("order", "died", "raised", "ended", "stuck", "slow", "point to point", "unknown")


def _reason(facts: RankFacts, group: GroupCalls) -> FaultKind:
    if facts.state == "died":
        return "died"
    if facts.state == "raised":
        return "raised"
    if facts.state == "ended":
        return "ended"
    if facts.state == "unknown":
        return "unknown"
    if any(call.is_p2p and not call.is_done for call in facts.calls):
        return "point to point"
    if _elsewhere(facts, group) is not None:
        return "order"
    return "slow" if facts.works else "stuck"


def _elsewhere(facts: RankFacts, group: GroupCalls) -> CollectiveCall | None:
    """Return the call of another group that a rank waits in."""
    return next((call for call in facts.calls if not call.is_done and not call.is_p2p and call.group != group.name), None)


def _absent(kind: FaultKind, late: list[RankFacts], waiting: list[int], waited: CollectiveCall, last: int | None) -> RankFault:
    ranks = [facts.rank for facts in late]
    who, others = ranks_words(ranks), ranks_words(waiting)
    at = f"{call_words(waited)} that {others} {wait(waiting)} for{place_words(waited)}"
    common = "" if last is None else f"; last common: seq {last}"
    evidence = [f"rank {facts.rank}: {stands_words(facts)}" for facts in late if facts.stands]
    remedy = "call the same collectives on all ranks, none under `if rank == …`"
    culprits, shown = ranks, kind
    if kind == "ended":
        culprits, shown, what = _ended(ranks, waiting, waited)
        if shown == "uneven batches":
            remedy = JOIN
    elif kind == "slow":
        work = "is only slow and still works" if len(ranks) == 1 else "are only slow and still work"
        what = f"{who} {work} at `{late[0].stands}`, before the {at}"
        remedy = "wait, or give it as much work as the others; `watch_ranks(timeout=…)` sets the patience"
    elif kind == "order":
        other = next(call for facts in late for call in facts.calls if not call.is_done and call.group != waited.group)
        what = (
            f"{who} {wait(ranks)} in {call_words(other)} of group {other.group}{place_words(other)},"
            f" {others} in {call_words(waited)} of group {waited.group}{place_words(waited)}; they use the groups in different"
            " orders"
        )
        culprits = [*ranks, *waiting]
    elif kind == "unknown":
        what = f"nothing is known of {who}; {'it' if len(ranks) == 1 else 'they'} did not reach the {at}"
        remedy = "run `nbguard.watch_ranks()` on every rank"
    elif kind in ("died", "raised"):
        error = f" by {late[0].error}" if late[0].error else ""
        what = f"{who} ended{error} before the {at}"
        remedy = "read its own output"
    else:
        what = f"{who} did not reach the {at}: {stands_words(late[0])}"
        remedy = "check that line; it blocks or waits for something else"
    return RankFault(
        kind=shown,
        ranks=tuple(sorted(culprits)),
        collective=waited.name,
        place=waited.place,
        last_common=last,
        what=f"{what}{common}",
        evidence=tuple(evidence),
        remedy=remedy,
    )


def _ended(ranks: list[int], waiting: list[int], waited: CollectiveCall) -> tuple[list[int], FaultKind, str]:
    """Return (ranks at fault, kind, sentence) where some ended and others wait: at fault is the smaller part."""
    who, others = ranks_words(ranks), ranks_words(waiting)
    verb, call = wait(waiting), call_at(waited)
    if len(waiting) < len(ranks):
        if waited.caller:
            return (
                waiting,
                "uneven batches",
                f"{others} had more batches; {who} ended, and {others} {verb} in {call}",
            )
        return (
            waiting,
            "extra",
            f"{others} {'calls' if len(waiting) == 1 else 'call'} {call}, and {who} ended without it",
        )
    if waited.caller:
        return ranks, "uneven batches", f"{who} had fewer batches and ended; {others} {verb} in {call}"
    return (
        ranks,
        "left out",
        f"{who} left out the {call_words(waited)} that {others} {verb} for{place_words(waited)}, and ended",
    )


def point_to_point(job: JobFacts) -> Iterator[RankFault]:
    """Yield ranks that wait for a message that nobody sends, or send one that nobody takes."""
    waiting = {facts.rank: call for facts in job.ranks for call in facts.calls if call.is_p2p and not call.is_done}
    told: set[int] = set()
    for rank, call in waiting.items():
        peer = call.peer
        if rank in told or peer is None or not 0 <= peer < job.world or job.ranks[peer].state in ("died", "raised"):
            continue
        told |= {rank, peer}
        wanted = "recv" if call.name == "send" else "send"
        own = waiting.get(peer)
        here = f"rank {rank} waits in {_message_words(call)}"
        if own is not None and own.peer == rank:
            what = f"{here}, and rank {peer} in {_message_words(own)}"
            ranks: tuple[int, ...] = tuple(sorted((rank, peer)))
        else:
            what = f"{here}, but rank {peer} left out the `{wanted}`; {stands_words(job.ranks[peer])}"
            ranks = (peer,)
        yield RankFault(
            kind="point to point",
            ranks=ranks,
            collective=call.name,
            place=call.place,
            last_common=None,
            what=what,
            remedy="each `send` wants one `recv` on its peer, and the other way round; both at once: `batch_isend_irecv`",
        )


def _message_words(call: CollectiveCall) -> str:
    return f"`{call.name}` {call.detail}{place_words(call)}"


def same_call(groups: tuple[GroupCalls, ...]) -> Iterator[RankFault]:
    """Yield a call that all ranks came to, and that does not end."""
    for group in groups:
        calls = [call for call in group.at(group.last).values() if call is not None]
        if len(calls) == len(group.calls) > 1 and not any(call.is_done for call in calls):
            yield RankFault(
                kind="same call",
                ranks=tuple(group.calls),
                collective=calls[0].name,
                place=calls[0].place,
                last_common=group.last,
                what=f"all ranks are in the same {call_at(calls[0])}, which does not end",
                remedy="check that the hosts reach each other, and that all ranks gave the same root and operation",
            )


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
        faults.extend(same_call(groups_of(job)))
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
    yield from point_to_point(job)
    for group in groups:
        yield from faults(job, group)


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
