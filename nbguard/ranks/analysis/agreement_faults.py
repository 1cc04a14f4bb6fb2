"""Faults of ranks that call different things at the same place in the order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from nbguard.ranks.analysis.alignment import GroupCalls, differences, is_shift
from nbguard.ranks.analysis.diagnosis import FaultKind, RankFault
from nbguard.ranks.analysis.facts import CollectiveCall, JobFacts
from nbguard.ranks.analysis.words import call_words, have, place_words, ranks_words

Made: TypeAlias = Mapping[int, CollectiveCall]
"""The calls of ranks at one position."""

JOIN = (
    "give every rank as many batches (`DistributedSampler`, `drop_last=True`), or wrap the loop in"
    " `with torch.distributed.algorithms.join.Join([model]):`"
)
_SAME_ORDER = "call the same collectives in the same order on all ranks: none under `if rank == …`"


def faults(job: JobFacts, group: GroupCalls) -> Iterator[RankFault]:
    """Yield the fault at the first place where the ranks of a group call something else, if there is one."""
    position = group.first_difference()
    if position is None:
        return
    made = {rank: call for rank, call in group.at(position).items() if call is not None}
    usual = _majority(made)
    if usual is None:
        usual, culprits = _waiting(group, position, made)
    else:
        culprits = tuple(rank for rank, call in made.items() if _key(call) != _key(made[usual]))
    yield _fault(job, group, position, made, usual, culprits)


def _key(call: CollectiveCall) -> tuple[object, ...]:
    return call.name, call.elements, call.dtype, call.detail, call.place


def _majority(made: Made) -> int | None:
    """Return a rank of the larger half; None if there is none."""
    counts = Counter(_key(call) for call in made.values()).most_common()
    if len(made) < 3 or (len(counts) > 1 and counts[0][1] == counts[1][1]):
        return None
    return next(rank for rank, call in made.items() if _key(call) == counts[0][0])


def _waiting(group: GroupCalls, position: int, made: Made) -> tuple[int, tuple[int, ...]]:
    """Return of two sides of equal size (a rank that waits, the ranks at fault): both, unless one has left something out."""
    sides: dict[tuple[object, ...], list[int]] = {}
    for rank, call in made.items():
        sides.setdefault(_key(call), []).append(rank)
    one, other = (ranks[0] for ranks in list(sides.values())[:2])
    for waits, goes_on in ((one, other), (other, one)):
        if _has_passed(group, position, made[waits], made[goes_on], waits, goes_on):
            return waits, tuple(sides[_key(made[goes_on])])
    return one, tuple(made)


def _has_passed(
    group: GroupCalls, position: int, waiting: CollectiveCall, going: CollectiveCall, waits: int, goes_on: int
) -> bool:
    """Say whether the rank that goes on has left out what the other waits for."""
    if waiting.place == going.place:
        return False
    if bool(waiting.caller) != bool(going.caller):
        return bool(waiting.caller)  # DistributedDataParallel's own come with each batch: the other has no more of them
    rest = [[calls[at] for at in sorted(calls) if at >= position] for calls in (group.calls[goes_on], group.calls[waits])]
    if is_shift(*rest):
        return True
    if is_shift(rest[1], rest[0]):
        return False
    last = group.before(position)
    expected = None if last is None else _after(group, position - 1, last)
    if expected is not None and _is_like(expected, waiting) != _is_like(expected, going):
        return _is_like(expected, waiting)
    return _comes_first(waiting, going, last)


def _after(group: GroupCalls, end: int, one: CollectiveCall) -> CollectiveCall | None:
    """Return the call that came after one like this the last time, before position `end`."""
    for calls in group.calls.values():
        for at in range(end - 1, group.first - 1, -1):
            if at in calls and at + 1 in calls and _is_like(calls[at], one):
                return calls[at + 1]
    return None


def _is_known(group: GroupCalls, end: int, one: CollectiveCall) -> bool:
    """Say whether there has been such a call before position `end`."""
    return any(_is_like(call, one) for calls in group.calls.values() for at, call in calls.items() if at < end)


def _is_like(one: CollectiveCall, other: CollectiveCall) -> bool:
    return (one.name, one.place) == (other.name, other.place)


def _comes_first(one: CollectiveCall, other: CollectiveCall, last: CollectiveCall | None) -> bool:
    """Say whether, by their lines in one file, `one` comes before `other`; lines above the last common call come after it."""
    lines = [_line(call) for call in (one, other)]
    if None in lines or lines[0][0] != lines[1][0]:  # type: ignore[index]
        return False
    start = None if last is None else _line(last)
    after = start[1] if start is not None and start[0] == lines[0][0] else 0  # type: ignore[index]
    first, second = ((line[1] <= after, line[1]) for line in lines)  # type: ignore[index]
    return first < second


def _line(call: CollectiveCall) -> tuple[str, int] | None:
    """Return the file and the line of a call; None if they are not known."""
    where = call.place.partition(" in ")[0]
    file, _, number = where.rpartition(", line ") if ", line " in where else where.rpartition(":")
    return (file, int(number)) if number.isdecimal() else None


def _fault(job: JobFacts, group: GroupCalls, position: int, made: Made, usual: int, culprits: tuple[int, ...]) -> RankFault:
    waited = made[usual]
    own = made[next((rank for rank in culprits if rank != usual), usual)]
    waiting = [rank for rank, call in made.items() if _key(call) == _key(waited)]
    kind, what, remedy = _judged(group, position, waited, own, waiting, culprits, usual)
    last = position - 1 if position > group.first else None
    common = "" if last is None else f"; last common: seq {last}"
    named = own if kind == "extra" else waited
    each: dict[str, list[int]] = {}
    for rank, call in made.items():
        each.setdefault(call_words(call) + place_words(call), []).append(rank)
    evidence = tuple(f"{ranks_words(ranks)}: {words}" for words, ranks in each.items())
    dead = [facts.rank for facts in job.ranks if facts.state == "died" and facts.rank in made]
    if dead and kind in ("size", "dtype"):
        evidence += (f"{ranks_words(dead)} {have(dead)} died of it: gloo ends the process whose buffer is the smaller",)
    return RankFault(
        kind=kind,
        ranks=tuple(sorted(culprits)),
        collective=named.name,
        place=named.place,
        last_common=last,
        what=f"{what}{common}",
        evidence=evidence,
        remedy=remedy,
    )


def _judged(
    group: GroupCalls,
    position: int,
    waited: CollectiveCall,
    own: CollectiveCall,
    waiting: list[int],
    culprits: tuple[int, ...],
    usual: int,
) -> tuple[FaultKind, str, str]:
    """Return the kind of a difference, the sentence and the remedy."""
    who, others = ranks_words(culprits), ranks_words(waiting)
    verb = "waits" if len(waiting) == 1 else "wait"
    if waited.caller and not own.caller:
        what = (
            f"{who} {have(culprits)} had fewer batches: {others} {verb} in DistributedDataParallel for"
            f" {call_words(waited)}{place_words(waited)}, {who} {'is' if len(culprits) == 1 else 'are'} past the loop, in"
            f" {call_words(own)}{place_words(own)}"
        )
        return "uneven batches", what, JOIN
    if own.caller and not waited.caller and usual not in culprits:
        what = (
            f"{who} {have(culprits)} had more batches: {'it waits' if len(culprits) == 1 else 'they wait'} in"
            f" DistributedDataParallel for {call_words(own)}{place_words(own)}, {others} {'is' if len(waiting) == 1 else 'are'}"
            f" past the loop, in {call_words(waited)}{place_words(waited)}"
        )
        return "uneven batches", what, JOIN
    kinds = differences(waited, own)
    if waited.place != own.place and (kinds[:1] in ((), ("type",)) or usual not in culprits):
        return _displaced(group, position, waited, own, waiting, culprits, usual)
    return _unlike(kinds, waited, own, others, culprits, usual)


def _displaced(
    group: GroupCalls,
    position: int,
    waited: CollectiveCall,
    own: CollectiveCall,
    waiting: list[int],
    culprits: tuple[int, ...],
    usual: int,
) -> tuple[FaultKind, str, str]:
    """Return the judgement on ranks that are at different lines."""
    who, others = ranks_words(culprits), ranks_words(waiting)
    verb = "waits" if len(waiting) == 1 else "wait"
    at = f"{call_words(waited)} that {others} {verb} for{place_words(waited)}"
    instead, usually = (f"{call_words(call)}{place_words(call)}" for call in (own, waited))
    if usual in culprits:
        first, second = waiting, [rank for rank in culprits if rank not in waiting]
        what = (
            f"{ranks_words(first)} {verb} in {usually}, {ranks_words(second)}"
            f" {'waits' if len(second) == 1 else 'wait'} in {instead}: they call in a different order"
        )
        return "order", what, _SAME_ORDER
    culprit = next(rank for rank in culprits if rank != usual)
    is_new = _is_known(group, position, waited) and not _is_known(group, position, own)
    if is_new or not (waited.is_done or _has_passed(group, position, waited, own, usual, culprit)):
        what = f"{who} {have(culprits)} called {instead}, which {others} {have(waiting)} not: {others} {verb} in {usually}"
        return "extra", what, _SAME_ORDER
    if waited.is_done:
        made = f"{call_words(waited)} that {others} {have(waiting)} made{place_words(waited)}"
        return "left out", f"{who} {have(culprits)} left out the {made}, and went on with {instead}", _SAME_ORDER
    what = f"{who} {have(culprits)} left out the {at}, and {'is' if len(culprits) == 1 else 'are'} in {instead}"
    return "left out", what, _SAME_ORDER


def _unlike(
    kinds: tuple[str, ...], waited: CollectiveCall, own: CollectiveCall, others: str, culprits: tuple[int, ...], usual: int
) -> tuple[FaultKind, str, str]:
    """Return the judgement on ranks that call at one line, or the same collective, with something else."""
    kind: FaultKind = "type"
    remedy = "make the same call with the same kind of tensor on all ranks"
    if kinds[:1] == ("size",):
        kind, remedy = "size", "give tensors of one size: pad them, or gather the sizes first"
    elif kinds[:1] == ("dtype",):
        kind, remedy = "dtype", f"convert first, as in `tensor.to(torch.{waited.dtype})`"
    elif kinds[:1] == ("detail",):
        kind, remedy = "root or operation", "give the same root (`src`, `dst`) and the same operation (`op`) on all ranks"
    if usual in culprits:
        rest = ranks_words([rank for rank in culprits if f"rank {rank}" != others])
        what = f"{others} calls {call_words(waited)}{place_words(waited)}, {rest} {call_words(own)}{place_words(own)}"
        if len(culprits) > 2:
            each = [f"{call_words(call)}{place_words(call)}" for call in (waited, own)]
            what = f"{ranks_words(culprits)} call different things: {each[0]} and {each[1]}"
        return kind, what, remedy
    verb = "calls" if len(culprits) == 1 else "call"
    what = (
        f"{ranks_words(culprits)} {verb} {call_words(own)}{place_words(own)}, where {others} wait in"
        f" {call_words(waited)}{place_words(waited)}"
    )
    return kind, what, remedy
