"""Which of the user's own names make up for what is missing: the fewest, then the smallest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from nbguard.cleanup.plan.plan import Request
from nbguard.cleanup.plan.planner import plan_cleanup
from nbguard.memory.facts import Facts, PoolId
from nbguard.memory.graph import Holder, reach_of_roots, storages_of
from nbguard.memory.target import Target
from nbguard.out_of_memory.need import FailedRun, Space

_CANDIDATES = 6
_ALTERNATIVES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sacrifice:
    """Names to be let go, alone or after the default cleanup, and the storages that are free then."""

    names: tuple[str, ...]
    freed: frozenset[int]
    pools: frozenset[PoolId]
    and_cleanup: bool
    enough: bool | None


def sacrifices(space: Space, run: FailedRun, rows: Iterable[Holder]) -> tuple[Sacrifice, ...]:
    """Return what is enough: up to three single names, else the smallest pair, else the largest names until it is enough.

    Not what the failed run itself reads or has bound. Nothing, if even the six largest together are not enough: that is
    asked first, as each answer costs a plan or two.
    """
    names = [tuple(space.facts.graph.roots[root].label for root in row.roots) for row in rows if row.kind == "name"]
    needed = {*space.asked.uses, *space.asked.bound}
    free = [group for group in names if needed.isdisjoint(group)]
    reached = {group: space.on_it(_reached(space.facts, group)) for group in free}
    largest = sorted((group for group in free if reached[group]), key=reached.__getitem__, reverse=True)[:_CANDIDATES]
    if not largest or not _try(space, run, largest).enough:
        return ()
    for count in (1, 2):
        tried = (_try(space, run, combination) for combination in combinations(largest, count))
        found = sorted((each for each in tried if each.enough), key=lambda each: space.on_it(each.freed))
        if found:
            return tuple(found[: _ALTERNATIVES if count == 1 else 1])
    return tuple(_more(space, run, largest))


def _more(space: Space, run: FailedRun, largest: list[tuple[str, ...]]) -> Iterator[Sacrifice]:
    for count in range(3, len(largest) + 1):
        found = _try(space, run, largest[:count])
        if found.enough:
            yield found
            return


def _reached(facts: Facts, labels: Iterable[str]) -> set[int]:
    return storages_of(facts.graph, reach_of_roots(facts.graph, _numbers(facts, labels)))


def _numbers(facts: Facts, labels: Iterable[str]) -> set[int]:
    return {number for number, root in enumerate(facts.graph.roots) if root.kind == "name" and root.label in set(labels)}


def _try(space: Space, run: FailedRun, groups: Iterable[tuple[str, ...]]) -> Sacrifice:
    """Return what letting go of these names frees: by itself if that is enough, else with the default cleanup."""
    facts, labels = space.facts, tuple(label for group in groups for label in group)
    both = _with_cleanup(space, run, labels)
    if both.enough is False:
        return both
    alone = plan_cleanup(facts, Request(targets=tuple(Target(text=label, root=label) for label in labels)))
    enough = run.passes(space, alone.storages, alone.pools)
    return (
        both
        if both.enough and not enough
        else Sacrifice(names=labels, freed=alone.storages, pools=alone.pools, and_cleanup=False, enough=enough)
    )


def _with_cleanup(space: Space, run: FailedRun, labels: tuple[str, ...]) -> Sacrifice:
    """Return what is free after the default cleanup once these names are gone."""
    graph = space.facts.graph
    gone = _numbers(space.facts, labels)
    left = replace(graph, roots=tuple(root for n, root in enumerate(graph.roots) if n not in gone))
    after = plan_cleanup(replace(space.facts, graph=left), Request())
    kept = storages_of(graph, reach_of_roots(left, range(len(left.roots)))) - after.storages
    freed = frozenset(storages_of(graph, reach_of_roots(graph, range(len(graph.roots)))) - kept)
    enough = run.passes(space, freed, after.pools)
    return Sacrifice(names=labels, freed=freed, pools=after.pools, and_cleanup=True, enough=enough)
