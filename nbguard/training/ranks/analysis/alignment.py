"""The calls of a group's ranks side by side: how far they agree, and each one's call at the first difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nbguard.training.ranks.analysis.facts import CollectiveCall, JobFacts

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
