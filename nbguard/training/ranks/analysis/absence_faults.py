"""Faults of ranks that have not come to a call where others wait for them."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.training.ranks.analysis.agreement_faults import JOIN
from nbguard.training.ranks.analysis.alignment import GroupCalls
from nbguard.training.ranks.analysis.diagnosis import FaultKind, RankFault
from nbguard.training.ranks.analysis.facts import CollectiveCall, JobFacts, RankFacts
from nbguard.training.ranks.analysis.words import call_at, call_words, place_words, ranks_words, stands_words, wait


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
