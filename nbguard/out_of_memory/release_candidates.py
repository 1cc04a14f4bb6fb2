"""Names of the user's own that make up for the missing memory: the fewest of them, then the smallest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from nbguard.cleanup.plan.plan import Request
from nbguard.cleanup.plan.planner import plan_cleanup
from nbguard.memory.facts import Facts, PoolId
from nbguard.memory.references.graph import reach_of_roots, storages_of
from nbguard.memory.references.holders import Holder
from nbguard.memory.target import Target
from nbguard.out_of_memory.failed_request import FailedRequest, FailedRunUsage

_CANDIDATES = 6
_ALTERNATIVES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCandidate:
    """Names that could be let go, alone or together with the default cleanup."""

    names: tuple[str, ...]  # labels of the roots
    freed: frozenset[int]  # numbers of the storages that are free then
    pools: frozenset[PoolId]  # private pools that stay in use then
    and_cleanup: bool  # `%reset_gpu` goes with it
    enough: bool | None  # the same run would succeed then; None: not known


def release_candidates(
    request: FailedRequest, usage: FailedRunUsage, holders: Iterable[Holder]
) -> tuple[ReleaseCandidate, ...]:
    """Return the candidates that are enough: up to three single names, else the smallest pair, else the largest names together.

    Not the names that the failed run itself reads or has bound. None, if even the six largest together are not enough: that
    is asked first, as each answer costs a plan or two.
    """
    names = [holder.names for holder in holders if holder.kind == "name"]
    needed = {*request.oom.uses, *request.oom.bound}
    free = [group for group in names if needed.isdisjoint(group)]
    reached = {group: request.nbytes_here(_reached(request.facts, group)) for group in free}
    largest = sorted((group for group in free if reached[group]), key=reached.__getitem__, reverse=True)[:_CANDIDATES]
    if not largest or not _try(request, usage, largest).enough:
        return ()
    for count in (1, 2):
        tried = (_try(request, usage, combination) for combination in combinations(largest, count))
        enough = sorted((one for one in tried if one.enough), key=lambda one: request.nbytes_here(one.freed))
        if enough:
            return tuple(enough[: _ALTERNATIVES if count == 1 else 1])
    return tuple(_more(request, usage, largest))


def _more(request: FailedRequest, usage: FailedRunUsage, largest: list[tuple[str, ...]]) -> Iterator[ReleaseCandidate]:
    for count in range(3, len(largest) + 1):
        candidate = _try(request, usage, largest[:count])
        if candidate.enough:
            yield candidate
            return


def _reached(facts: Facts, labels: Iterable[str]) -> set[int]:
    return storages_of(facts.graph, reach_of_roots(facts.graph, _numbers(facts, labels)))


def _numbers(facts: Facts, labels: Iterable[str]) -> set[int]:
    return {number for number, root in enumerate(facts.graph.roots) if root.kind == "name" and root.label in set(labels)}


def _try(request: FailedRequest, usage: FailedRunUsage, groups: Iterable[tuple[str, ...]]) -> ReleaseCandidate:
    """Return the candidate of these names: by themselves if that is enough, else with the default cleanup."""
    facts, labels = request.facts, tuple(label for group in groups for label in group)
    both = _with_cleanup(request, usage, labels)
    if both.enough is False:
        return both
    alone = plan_cleanup(facts, Request(targets=tuple(Target(text=label, root=label) for label in labels)))
    enough = usage.would_succeed(request, alone.storages, alone.pools, is_emptied=True)
    return (
        both
        if both.enough and not enough
        else ReleaseCandidate(names=labels, freed=alone.storages, pools=alone.pools, and_cleanup=False, enough=enough)
    )


def _with_cleanup(request: FailedRequest, usage: FailedRunUsage, labels: tuple[str, ...]) -> ReleaseCandidate:
    """Return the candidate of these names with the default cleanup after them."""
    graph = request.facts.graph
    gone = _numbers(request.facts, labels)
    left = replace(graph, roots=tuple(root for n, root in enumerate(graph.roots) if n not in gone))
    after = plan_cleanup(replace(request.facts, graph=left), Request())
    kept = storages_of(graph, reach_of_roots(left, range(len(left.roots)))) - after.storages
    freed = frozenset(storages_of(graph, reach_of_roots(graph, range(len(graph.roots)))) - kept)
    enough = usage.would_succeed(request, freed, after.pools, is_emptied=True)
    return ReleaseCandidate(names=labels, freed=freed, pools=after.pools, and_cleanup=True, enough=enough)
