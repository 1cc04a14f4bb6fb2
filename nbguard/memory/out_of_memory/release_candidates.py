"""Names and grown containers that make up for the missing memory when let go of or parked, the fewest, then the smallest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, replace
from itertools import combinations

from nbguard.errors import TargetError
from nbguard.memory.cleanup.plan.parking import default_plan, plan_parking
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.advice import Advice, park, release_names, release_stale
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph, Root, Target
from nbguard.memory.core.oom_facts import Growing
from nbguard.memory.core.references.graph import (
    GRAPH,
    nbytes_of,
    path_text,
    reach,
    reach_of_roots,
    shortest_path,
    storages_of,
    without,
)
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.out_of_memory.rerun import After, Rerun, RerunVerdict

# --- A container that the failed run filled, such as the list of outputs that grows with each batch.


_CONTAINERS = frozenset({"list", "dict", "deque", "defaultdict"})
_OF_LIBRARIES = {
    "EvalLoopContainer": "`TrainingArguments(eval_accumulation_steps=1)` moves them to host memory after each batch, a larger "
    "number more rarely; `prediction_loss_only=True` keeps none, where no metric needs them",
}
"""Containers of a library's own loop for a model's outputs, by their classes, and the way to keep them small."""
_FEWEST = 3
"""Least elements of a container that is said to grow."""
_MOST = 4
"""Least share, a quarter, of the failed run's bytes that it holds."""
_LAST_NAME = re.compile(r"(\w+)(?:\[[^\[\]]*\])*$")
"""The name in front of the subscripts at the end of a path."""


def growing_container(rerun: Rerun) -> Growing | None:
    """Return the container that holds most of the failed run's remaining bytes, or None.

    It is one of tensors other than parameters, and a loop of the run put them there, or a library's own loop: it is in a
    variable of a frame of the error, or in a name that the run uses. Tensors that autograd's graphs keep are none.
    """
    facts, oom = rerun.request.facts, rerun.request.oom
    graph, found = facts.graph, list[tuple[int, Growing]]()
    for root in graph.roots:
        is_variable = root.kind == ("frame" if oom.is_final else "error")
        if not is_variable and not (root.kind == "name" and root.label in {*oom.uses, *oom.bound}):
            continue
        for number in reach(graph, root.nodes):
            name = graph.nodes[number].type_name
            grows = _growing if name in _CONTAINERS else _of_library if name in _OF_LIBRARIES else None
            if grows is not None and (one := grows(rerun, graph, root, number)) is not None:
                found.append((one.nbytes, one))
    most = max(found, key=lambda one: one[0], default=(0, None))
    whole = rerun.allocated if oom.is_final else max(rerun.own_bytes, rerun.taken)
    return most[1] if most[0] * _MOST >= max(whole, 1) else None


def _growing(rerun: Rerun, graph: Graph, root: Root, number: int) -> Growing | None:
    parameters = {n for n, node in enumerate(graph.nodes) if node.type_name == "Parameter"}
    tensors = [n for n in graph.nodes[number].children if graph.nodes[n].kind == "tensor" and n not in parameters]
    if len(tensors) < _FEWEST:
        return None
    path = shortest_path(graph, root, {number})
    text = path_text(graph, root, path)
    last = _LAST_NAME.search(text)
    if GRAPH in text or last is None or last[1] not in rerun.request.oom.fills:
        return None
    nbytes = rerun.request.nbytes_here(storages_of(graph, reach(graph, tensors, blocked=parameters)))
    shown = {storage for child in tensors for storage in graph.nodes[child].storages}
    keeps_graph = nbytes_of(graph, shown) < nbytes and any(
        graph.nodes[n].kind == "graph" for child in tensors for n in graph.nodes[child].children
    )
    text = path_text(graph, root, path, shorten=4)
    return Growing(name=text, elements=len(tensors), nbytes=nbytes, keeps_graph=keeps_graph)


def _of_library(rerun: Rerun, graph: Graph, root: Root, number: int) -> Growing | None:
    nbytes = rerun.request.nbytes_here(storages_of(graph, reach(graph, {number})))
    text = path_text(graph, root, shortest_path(graph, root, {number}), shorten=4)
    return Growing(name=text, elements=0, nbytes=nbytes, less=_OF_LIBRARIES[graph.nodes[number].type_name])


_CANDIDATES = 6
_ALTERNATIVES = 3
_NOT_MOVED = frozenset({"graph", "pool", "iterator"})
"""Kinds of nodes whose tensors a parking leaves where they are, or may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCandidate:
    """Names that could be let go or parked, and the state of the device then."""

    names: tuple[str, ...]  # labels of the roots; empty for the default cleanup alone
    advice: tuple[Advice, ...]  # lines to run one after the other
    after: After  # the device then
    verdict: RerunVerdict  # of the cell run again then
    has_learner: bool = False  # a Learner is let go of


def release_candidates(rerun: Rerun, holders: Iterable[Holder], leftovers: tuple[str, ...]) -> tuple[ReleaseCandidate, ...]:
    """Return the candidates that let the request succeed: up to three single names, else the smallest pair, else the largest.

    Not the names that the failed run reads, may reach or has bound: its next run would miss them, but for those that it binds
    further on before it reads them, which count as one. `leftovers` are let go of with each of them. None, if even the six
    largest together are not enough: that is asked first, as each answer costs a plan or two.
    """
    replaced = replaced_names(rerun)
    groups = [replaced] * bool(replaced) + candidate_names(rerun, holders)
    base = with_cleanup(rerun, leftovers)
    if not groups or not _helps(rerun, _released(rerun, groups, leftovers), base):
        return ()
    for count in (1, 2):
        tried = [_released(rerun, chosen, leftovers) for chosen in combinations(groups, count)]
        helpful = sorted((one for one in tried if _helps(rerun, one, base)), key=lambda one: _cost(rerun, one, base))
        if helpful:
            return tuple(helpful[: _ALTERNATIVES if count == 1 else 1])
    tried = [_released(rerun, groups[:count], leftovers) for count in range(3, len(groups) + 1)]
    helpful = [one for one in tried if _helps(rerun, one, base)]
    return tuple(sorted(helpful, key=lambda one: one.verdict is not RerunVerdict.RERUN)[:1])


def parking_candidates(rerun: Rerun, holders: Iterable[Holder], leftovers: tuple[str, ...]) -> tuple[ReleaseCandidate, ...]:
    """Return the names whose parking lets the request succeed: up to two single ones, else the largest together."""
    if rerun.request.is_of_host or rerun.request.facts.tracked == "simulated":
        return ()
    groups = candidate_names(rerun, holders)
    if not groups:
        return ()
    base = with_cleanup(rerun, leftovers)
    single = [one for group in groups if (one := _parked(rerun, (group,), base)) is not None and _helps(rerun, one, base)]
    if single:
        return tuple(sorted(single, key=lambda one: _cost(rerun, one, base))[:2])
    for count in range(2, len(groups) + 1):
        together = _parked(rerun, groups[:count], base)
        if together is not None and _helps(rerun, together, base):
            return (together,)
    return ()


def candidate_names(rerun: Rerun, holders: Iterable[Holder]) -> list[tuple[str, ...]]:
    """Return the largest names, each with its other names, that the failed run can do without."""
    request = rerun.request
    needed = {*request.oom.uses, *request.oom.bound, *request.oom.makes, *(request.oom.reaches or ())}
    groups = [holder.names for holder in holders if holder.kind == "name" and needed.isdisjoint(holder.names)]
    reached = {group: request.nbytes_here(_reached(request.facts, group)) for group in groups}
    return sorted((group for group in groups if reached[group]), key=reached.__getitem__, reverse=True)[:_CANDIDATES]


def leftover_names(rerun: Rerun) -> tuple[str, ...]:
    """Return the names that hold memory here and that each run of the cell binds again before it reads them."""
    return _holding(rerun, rerun.request.oom.makes)


def replaced_names(rerun: Rerun) -> tuple[str, ...]:
    """Return the names that hold memory here and whose values the rest of the cell replaces before it reads them."""
    oom = rerun.request.oom
    return _holding(rerun, {*oom.replaces} - {*oom.bound, *oom.makes})


def _holding(rerun: Rerun, names: Collection[str]) -> tuple[str, ...]:
    facts = rerun.request.facts
    labels = (root.label for root in facts.graph.roots if root.kind == "name" and root.label in names)
    return tuple(label for label in labels if rerun.request.nbytes_here(_reached(facts, (label,))))


def with_cleanup(rerun: Rerun, names: tuple[str, ...]) -> ReleaseCandidate:
    """Return the candidate of these names with the default cleanup after them."""
    request = rerun.request
    graph = request.facts.graph
    gone = _numbers(request.facts, names)
    left = replace(graph, roots=tuple(root for n, root in enumerate(graph.roots) if n not in gone))
    plan = plan_cleanup(replace(request.facts, graph=left), Request())
    kept = storages_of(graph, reach_of_roots(left, range(len(left.roots)))) - plan.storages
    freed = frozenset(storages_of(graph, reach_of_roots(graph, range(len(graph.roots)))) - kept)
    after = After(freed=freed, pools=plan.pools, is_emptied=True)
    lines: tuple[Advice, ...] = (release_stale(),)
    if names:
        lines = _lines_of(request.analysis, names, freed)
    return ReleaseCandidate(names=names, advice=lines, after=after, verdict=_verdict(rerun, after, names))


def _lines_of(analysis: Analysis, names: tuple[str, ...], freed: Set[int]) -> tuple[Advice, ...]:
    """Return the lines that free these storages with the names, the cleanup, which costs nothing, first where it can be."""
    request = Request(targets=tuple(Target(text=name, root=name) for name in names))
    if plan_cleanup(analysis.facts, request).storages == freed:
        return (release_names(names),)
    cleaned = analysis.once(_after_cleanup)
    is_same = analysis.once(default_plan).storages | plan_cleanup(cleaned, request).storages == freed
    return (release_stale(), release_names(names)) if is_same else (release_names(names), release_stale())


def _after_cleanup(analysis: Analysis) -> Facts:
    """Return the facts as the default cleanup leaves them, on which each candidate's names are tried."""
    stale = analysis.once(default_plan)
    return replace(analysis.facts, graph=without(analysis.facts.graph, stale.gone, stale.cut))


def _released(rerun: Rerun, groups: Iterable[tuple[str, ...]], leftovers: tuple[str, ...]) -> ReleaseCandidate:
    """Return the candidate of these names: by themselves if that is enough, else with the default cleanup."""
    facts, names = rerun.request.facts, tuple(label for group in groups for label in group)
    both = with_cleanup(rerun, (*names, *leftovers))
    targets = tuple(Target(text=label, root=label) for label in both.names)
    alone = plan_cleanup(facts, Request(targets=targets))
    after = After(freed=alone.storages, pools=alone.pools, is_emptied=True)
    lines = tuple(line for line in both.advice if line.targets)
    by_itself = replace(both, advice=lines, after=after, verdict=_verdict(rerun, after, both.names))
    chosen = by_itself if by_itself.verdict is RerunVerdict.RERUN or _same_help(by_itself, both) else both
    return replace(chosen, names=names, has_learner=_has_learner(facts, names))


def _same_help(one: ReleaseCandidate, other: ReleaseCandidate) -> bool:
    return one.verdict is other.verdict and _lets_through(one)


def _parked(rerun: Rerun, groups: Iterable[tuple[str, ...]], base: ReleaseCandidate) -> ReleaseCandidate | None:
    """Return the candidate of these names, parked, with the cleanup `base` after it if need be; None if one cannot be moved.

    It is never enough: a tensor that something outside Python shares stays, and only the parking itself can tell.
    """
    facts, names = rerun.request.facts, tuple(group[0] for group in groups)
    nodes = reach_of_roots(facts.graph, _numbers(facts, names))
    if any(facts.graph.nodes[node].kind in _NOT_MOVED for node in nodes):
        return None
    try:
        plan = plan_parking(facts, tuple(Target(text=name, root=name) for name in names), {})
    except TargetError:
        return None
    if plan.skipped:
        return None
    parked = frozenset(plan.storages)
    alone = After(freed=parked, pools=plan.pools, is_emptied=True)
    both = replace(base.after, freed=base.after.freed | parked)
    lines: tuple[Advice, ...] = (park(names),)
    by_itself = ReleaseCandidate(names=names, advice=lines, after=alone, verdict=_verdict(rerun, alone, names))
    lines += base.advice if base.after.freed else ()
    together = ReleaseCandidate(names=names, advice=lines, after=both, verdict=_verdict(rerun, both, names))
    chosen = by_itself if by_itself.verdict is RerunVerdict.RERUN or _same_help(by_itself, together) else together
    return replace(chosen, verdict=RerunVerdict.REQUEST) if chosen.verdict is RerunVerdict.RERUN else chosen


def _verdict(rerun: Rerun, after: After, names: Iterable[str]) -> RerunVerdict:
    """Return the verdict; where the run may read any name, letting go of one that it may need is never enough."""
    verdict = rerun.verdict(after)
    is_open = rerun.request.oom.reaches is None and any(name not in rerun.request.oom.makes for name in names)
    return RerunVerdict.REQUEST if is_open and verdict is RerunVerdict.RERUN else verdict


def _lets_through(candidate: ReleaseCandidate) -> bool:
    return candidate.verdict in (RerunVerdict.RERUN, RerunVerdict.REQUEST)


def _helps(rerun: Rerun, candidate: ReleaseCandidate, base: ReleaseCandidate) -> bool:
    """Say whether the candidate is worth its names beside `base`, which touches none of the user's.

    Where both let the request through, and for neither is it known whether the cell runs through, its names must make up for
    the memory that the failed run lacked: with less than that, the same run fails at the same place.
    """
    if candidate.verdict is not base.verdict or not _lets_through(candidate):
        return _lets_through(candidate)
    return rerun.request.nbytes_here(candidate.after.freed - base.after.freed) >= rerun.request.missing


def _cost(rerun: Rerun, candidate: ReleaseCandidate, base: ReleaseCandidate) -> tuple[bool, bool, int]:
    """Return the rank of a candidate among others: enough, without a Learner, the least of the memory that is not stale.

    Names that the rest of the cell replaces cost nothing.
    """
    lost = rerun.request.nbytes_here(candidate.after.freed - base.after.freed)
    lost *= not {*candidate.names} <= {*rerun.request.oom.replaces}
    return candidate.verdict is not RerunVerdict.RERUN, candidate.has_learner, lost


def _has_learner(facts: Facts, names: Iterable[str]) -> bool:
    nodes = facts.graph.nodes
    return any(nodes[node].kind == "learner" for node in reach_of_roots(facts.graph, _numbers(facts, names)))


def _reached(facts: Facts, labels: Iterable[str]) -> set[int]:
    return storages_of(facts.graph, reach_of_roots(facts.graph, _numbers(facts, labels)))


def _numbers(facts: Facts, labels: Iterable[str]) -> set[int]:
    wanted = set(labels)
    return {number for number, root in enumerate(facts.graph.roots) if root.kind == "name" and root.label in wanted}
