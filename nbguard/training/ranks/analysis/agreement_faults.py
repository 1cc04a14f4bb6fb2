"""Faults of ranks that call different things at the same place in the order of calls, and the calls side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nbguard.training.ranks.analysis.facts import (
    CollectiveCall,
    FaultKind,
    JobFacts,
    RankFault,
    are,
    call_at,
    call_words,
    place_words,
    ranks_words,
    wait,
)

# --- The calls of a group's ranks side by side: how far they agree, and each one's call at the first difference.


Calls: TypeAlias = Mapping[int, CollectiveCall]
"""Calls of one rank by their positions."""


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The collectives of the ranks of one process group."""

    name: str
    calls: Mapping[int, Calls]  # of each rank of the group

    @property
    def first(self) -> int:
        """Return the first position that all ranks still remember."""
        return max((min(calls, default=1) for calls in self.calls.values()), default=1)

    @property
    def last(self) -> int:
        """Return the last position that any rank came to."""
        return max((max(calls, default=0) for calls in self.calls.values()), default=0)

    def at(self, position: int) -> dict[int, CollectiveCall | None]:
        """Return the call of each rank at a position, or None if it has not come to it."""
        return {rank: calls.get(position) for rank, calls in self.calls.items()}

    def before(self, position: int) -> CollectiveCall | None:
        """Return the last call that all ranks have in common before a position."""
        return next((calls[position - 1] for calls in self.calls.values() if position - 1 in calls), None)

    def first_difference(self) -> int | None:
        """Return the first position with different calls of two ranks, or None if all their calls agree.

        Where the calls agree from some place on in all but their lines, and one rank's lines are the others' one call later,
        that place is meant: calls of one kind fit each other though they are not the same.
        """
        made = self._made()
        for position, calls in made.items():
            first, *others = calls
            if any(differ(first, other) for other in others):
                return self._first_shift(made, position) or position
        return self._first_shift(made, self.last + 1)

    def _made(self) -> dict[int, list[CollectiveCall]]:
        """Return the calls at each position that all ranks remember and any came to, in their order."""
        made: dict[int, list[CollectiveCall]] = {}
        for calls in self.calls.values():
            for position, call in calls.items():
                made.setdefault(position, []).append(call)
        first = self.first
        return {position: made[position] for position in sorted(made) if position >= first}

    def _first_shift(self, made: Mapping[int, Sequence[CollectiveCall]], end: int) -> int | None:
        """Return the first position before `end` where a rank's lines begin to be others' lines one call later."""
        start = None
        for position in reversed([position for position in made if position < end]):
            places = [call.place for call in made[position] if call.place]
            if len(places) == len(self.calls) and len(set(places)) == 1:
                break
            if len(set(places)) > 1:
                start = position
        if start is None:
            return None
        sequences = [[calls[at] for at in sorted(calls) if at >= start] for calls in self.calls.values()]
        called = [sequence for sequence in sequences if sequence]
        shifted = any(is_shift(one, other) for one in called for other in called if one is not other)
        return start if shifted else None


def groups_of(job: JobFacts) -> tuple[GroupCalls, ...]:
    """Return the calls of the job by process groups. A group of unknown ranks has those that called in it."""
    members: dict[str, set[int]] = {}  # as far as the ranks know them
    made: dict[str, dict[int, dict[int, CollectiveCall]]] = {}
    for facts in job.ranks:
        for name, ranks in facts.groups:
            members.setdefault(name, set()).update(ranks)
        for call in facts.calls:
            if not call.is_p2p:
                made.setdefault(call.group, {}).setdefault(facts.rank, {})[call.position] = call
    named = {}
    for name, calls in made.items():
        is_default = not members and name in ("0", "default_pg")  # torch numbers groups, the one of all ranks first
        of_group = {*calls, *members.get(name, ()), *(range(job.world) if is_default else ())}
        named[name] = GroupCalls(name, {rank: calls.get(rank, {}) for rank in sorted(of_group) if rank < job.world})
    return tuple(named.values())


def differ(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Say whether two calls cannot belong together: of another kind, size, dtype, root or operation."""
    return bool(differences(one, other))


def differences(one: CollectiveCall, other: CollectiveCall) -> tuple[str, ...]:
    """Return the differences of two calls: "type" alone, or "size", "dtype" and "detail"."""
    if one.name != other.name:
        return ("type",)
    found = []
    if None not in (one.elements, other.elements) and one.elements != other.elements:
        found.append("size")
    if one.dtype and other.dtype and one.dtype != other.dtype:
        found.append("dtype")
    if one.detail and other.detail and one.detail != other.detail:
        found.append("detail")
    return tuple(found)


def is_shift(one: Sequence[CollectiveCall], other: Sequence[CollectiveCall]) -> bool:
    """Say whether `one` is `other` without its first call, as far as both go and for one call at least."""
    pairs = list(zip(one, other[1:], strict=False))
    return bool(pairs) and all(a.name == b.name and a.place == b.place for a, b in pairs)


Made: TypeAlias = Mapping[int, CollectiveCall]
"""The calls of ranks at one position."""

JOIN = (
    "give every rank as many batches (`DistributedSampler`, `drop_last=True`), or wrap the loop in"
    " `with torch.distributed.algorithms.join.Join([model])`"
)
_SAME_ORDER = "call the same collectives in the same order on all ranks, none under `if rank == …`"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDifference:
    """The calls of a group at the first position at which its ranks call something else."""

    group: GroupCalls
    position: int
    waited: CollectiveCall  # of the ranks that are right, or of one side where nobody is known to be
    own: CollectiveCall  # of the others
    waiting: Sequence[int]  # ranks that make the call `waited`
    culprits: tuple[int, ...]  # ranks at fault; all of them where it is not known which
    usual: int  # one of the ranks that make the call `waited`

    @property
    def is_even(self) -> bool:
        """Return whether it is not known which side is at fault."""
        return self.usual in self.culprits

    @property
    def who(self) -> str:
        """Return the ranks at fault in words."""
        return ranks_words(self.culprits)

    @property
    def others(self) -> str:
        """Return the waiting ranks in words."""
        return ranks_words(self.waiting)


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
    """Say whether the rank that goes on left out the other's call."""
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
    first = group.first
    for calls in group.calls.values():
        for at in sorted((at for at in calls if first <= at < end), reverse=True):
            if at + 1 in calls and _is_like(calls[at], one):
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
    kind, what, remedy = _diagnosed(
        CallDifference(group=group, position=position, waited=waited, own=own, waiting=waiting, culprits=culprits, usual=usual)
    )
    last = position - 1 if position > group.first else None
    common = "" if last is None else f"; last common: seq {last}"
    named = own if kind == "extra" else waited
    each: dict[str, list[int]] = {}
    for rank, call in made.items():
        each.setdefault(call_at(call), []).append(rank)
    evidence = tuple(f"{ranks_words(ranks)}: {words}" for words, ranks in each.items())
    dead = [facts.rank for facts in job.ranks if facts.state == "died" and facts.rank in made]
    if dead and kind in ("size", "dtype"):
        evidence += (f"{ranks_words(dead)} died because gloo ends the process with the smaller buffer",)
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


def _diagnosed(difference: CallDifference) -> tuple[FaultKind, str, str]:
    """Return the kind of a difference, the sentence and the remedy."""
    waited, own, who, others = difference.waited, difference.own, difference.who, difference.others
    culprits, waiting = difference.culprits, difference.waiting
    if waited.caller and not own.caller:
        return _past_the_loop(difference)
    if own.caller and not waited.caller and not difference.is_even:
        they = "it" if len(culprits) == 1 else "they"
        what = (
            f"{who} had more batches; {they} {wait(culprits)} in DistributedDataParallel for {call_at(own)},"
            f" {others} {are(waiting)} past the loop, in {call_at(waited)}"
        )
        return "uneven batches", what, JOIN
    kinds = differences(waited, own)
    if waited.place != own.place and (kinds[:1] in ((), ("type",)) or not difference.is_even):
        return _displaced(difference)
    return _unlike(difference, kinds)


def _past_the_loop(difference: CallDifference) -> tuple[FaultKind, str, str]:
    """Return the diagnosis on ranks that call something of their own while the others are in DistributedDataParallel.

    Where no rank came to that line before, nothing tells whether they are past the loop, or alone call it in its midst.
    """
    waited, own, who, others = difference.waited, difference.own, difference.who, difference.others
    culprits, waiting = difference.culprits, difference.waiting
    is_known = _is_known(difference.group, difference.position, own)
    fewer = "fewer batches" if is_known else f"fewer batches, or {'makes' if len(culprits) == 1 else 'make'} an extra call"
    where = "past the loop, in" if is_known else "in"
    what = (
        f"{who} had {fewer}; {others} {wait(waiting)} in DistributedDataParallel for {call_at(waited)},"
        f" {who} {are(culprits)} {where} {call_at(own)}"
    )
    alone = (
        ""
        if is_known
        else f"; where {who} alone {'makes' if len(culprits) == 1 else 'make'} that call, take it out of `if rank == …`"
    )
    return "uneven batches", what, f"{JOIN}{alone}"


def _displaced(difference: CallDifference) -> tuple[FaultKind, str, str]:
    """Return the diagnosis on ranks that are at different lines."""
    waited, own, who, others = difference.waited, difference.own, difference.who, difference.others
    culprits, waiting = difference.culprits, difference.waiting
    if difference.is_even:
        rest = [rank for rank in culprits if rank not in waiting]
        what = (
            f"{others} {wait(waiting)} in {call_at(waited)}, {ranks_words(rest)} {wait(rest)} in {call_at(own)};"
            " they call in a different order"
        )
        return "order", what, _SAME_ORDER
    group, position = difference.group, difference.position
    is_new = _is_known(group, position, waited) and not _is_known(group, position, own)
    if is_new or not (waited.is_done or _has_passed(group, position, waited, own, difference.usual, culprits[0])):
        what = f"{who} called {call_at(own)}, which {others} did not; {others} {wait(waiting)} in {call_at(waited)}"
        return "extra", what, _SAME_ORDER
    if waited.is_done:
        made = f"{call_words(waited)} that {others} made{place_words(waited)}"
        return "left out", f"{who} left out the {made} and went on with {call_at(own)}", _SAME_ORDER
    at = f"{call_words(waited)} that {others} {wait(waiting)} for{place_words(waited)}"
    what = f"{who} left out the {at}, and {are(culprits)} in {call_at(own)}"
    return "left out", what, _SAME_ORDER


def _unlike(difference: CallDifference, kinds: tuple[str, ...]) -> tuple[FaultKind, str, str]:
    """Return the diagnosis on ranks that call at one line, or the same collective, with something else."""
    waited, own, who, others = difference.waited, difference.own, difference.who, difference.others
    culprits = difference.culprits
    kind: FaultKind = "type"
    remedy = "make the same call with the same kind of tensor on all ranks"
    if kinds[:1] == ("size",):
        kind, remedy = "size", "give tensors of one size; pad them, or gather the sizes first"
    elif kinds[:1] == ("dtype",):
        kind, remedy = "dtype", f"convert first, as in `tensor.to(torch.{waited.dtype})`"
    elif kinds[:1] == ("detail",):
        kind, remedy = "root or operation", "give the same root (`src`, `dst`) and the same operation (`op`) on all ranks"
    if not difference.is_even:
        verb = "calls" if len(culprits) == 1 else "call"
        return kind, f"{who} {verb} {call_at(own)}, where {others} wait in {call_at(waited)}", remedy
    if len(culprits) > 2:
        return kind, f"{who} make different calls: {call_at(waited)} and {call_at(own)}", remedy
    rest = ranks_words([rank for rank in culprits if rank not in difference.waiting])
    return kind, f"{others} calls {call_at(waited)}, {rest} {call_at(own)}", remedy
