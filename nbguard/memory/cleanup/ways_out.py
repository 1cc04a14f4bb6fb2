"""The line that ends each holder, or the reason why there is none. Findings and cleanups show the same. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from nbguard.memory.cleanup.figures import holdings_of
from nbguard.memory.cleanup.plan.optional_steps import held_by_errors, kept_errors
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Advice
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph, Root
from nbguard.memory.core.references.graph import STALE_KINDS, Edge, reach, shortest_path
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.references.model_rest import contents_of
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes
from nbguard.memory.core.references.releases import joined, release_of_alike, release_of_way, releases_of_root

_CONTAINERS = frozenset({"list", "dict", "tuple", "set"})
_MOST_TRIED = 4
"""Roots of shared memory whose lines are tried one by one."""
_SHARED = Advice(command="", effect="shared: goes when all of them are released")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A root that is no experiment itself but keeps one alive, and the line that lets go of that: a bound method, a partial."""

    root: int  # its number
    nbytes: int  # bytes that it leads to
    advice: Advice


def way_out(analysis: Analysis, holder: Holder) -> Advice:
    """Return the line that frees most of a holder's bytes; one without a command says in its effect why not."""
    facts = analysis.facts
    if holder.is_shared:
        return _of_shared(analysis, holder)
    number = holder.roots[0]
    root = facts.graph.roots[number]
    if root.kind == "out":
        return advice.release_output(root.label, holder.retained)
    if root.kind in STALE_KINDS:
        return advice.release_stale()
    if root.kind == "frame":
        return advice.WAIT
    handle = next((each.advice for each in analysis.once(handles) if each.root == number), advice.NONE)
    if handle.command:
        return handle
    contents = contents_of(facts.graph, root)
    if contents is not None and 2 * contents.rest > holder.retained:
        for line in (contents.advice, contents.hooks):
            if line.command:
                return line
    if root.kind != "name":
        return release_of_root(facts, root)
    errors = analysis.once(errors_of_names).get(root.label, frozenset())
    if 2 * held_by_errors(facts.graph, errors) > holder.retained:
        return advice.release_errors(plan_cleanup(facts, Request(errors=True)).promised)
    return advice.release_names(holder.names, holder.retained)


def _of_shared(analysis: Analysis, holder: Holder) -> Advice:
    """Return the line that frees memory of several roots: that of one of them, where that is enough, or with all as targets."""
    facts = analysis.facts
    if any(facts.graph.roots[number].kind == "frame" for number in holder.roots):
        return advice.WAIT
    if holder.together.command:
        return holder.together
    rows = {number: row for row, _ in analysis.once(holdings_of) if not row.is_shared for number in row.roots}
    roots = tuple(number for number in holder.roots if not _is_made_class(facts.graph.roots[number])) or holder.roots
    alone = {number: way_out(analysis, rows[number]) for number in roots[:_MOST_TRIED] if number in rows}
    for line in alone.values():
        if line.is_code and (promised(facts, (line,)) or 0) >= holder.retained:
            return line
    if len(roots) == 1:
        root = facts.graph.roots[roots[0]]
        return advice.delete_name(root.label) if root.kind == "name" else _SHARED
    lines = [alone.get(number, advice.NONE) for number in holder.roots]
    if all(line.targets for line in lines):
        together = advice.release_names([*dict.fromkeys(text for line in lines for text in line.targets)])
        if (frees := promised(facts, lines) or 0) >= holder.retained:
            return replace(together, frees=frees, cut=frozenset[Edge]().union(*(line.cut for line in lines)))
    freeing = [(promised(facts, (line,)) or 0, place, line) for place, line in enumerate(alone.values()) if line.is_code]
    most, _, line = max(freeing, default=(0, 0, _SHARED))
    return replace(line, frees=most) if most else _SHARED


def _is_made_class(root: Root) -> bool:
    """Say whether a root is a class that a library made while the code ran, such as a mock's. It goes with its objects."""
    return root.is_class and not root.module


def release_of_root(facts: Facts, root: Root) -> Advice:
    """Return the line that lets go of the contents of a module's global, a library or a registry, with its bytes."""
    lines = releases_of_root(facts.graph, root)
    if lines and lines[0].command:
        lines = tuple(line for line in lines if line.targets) if lines[0].targets else lines[:1]
        if frees := promised(facts, lines):
            release, effects = joined(facts.graph, lines, frees), {line.effect for line in lines}
            return replace(release, effect=lines[0].effect) if len(effects) == 1 else release
    return _reason(facts.graph, root)


def _reason(graph: Graph, root: Root) -> Advice:
    """Return why no line lets go of a root's objects."""
    carriers = {node for node in reach(graph, root.nodes) if graph.nodes[node].storages}
    line = release_of_way(graph, root, shortest_path(graph, root, carriers))
    if line.effect and not line.command:
        return line
    return advice.ONLY_WITH_CLASS if _is_made_class(root) else advice.ONLY_WITH_KERNEL


def errors_of_names(analysis: Analysis) -> Mapping[str, Set[int]]:
    """Return the exceptions that the user's names lead to, by name."""
    return kept_errors(analysis.facts.graph)


def handles(analysis: Analysis) -> tuple[Handle, ...]:
    """Return the roots that are no experiment but keep one alive that no name leads to otherwise, each line once."""
    return tuple(_handles(analysis))


def _handles(analysis: Analysis) -> Iterator[Handle]:
    facts, graph = analysis.facts, analysis.facts.graph
    rows, errors = (row for row, _ in analysis.once(holdings_of)), analysis.once(errors_of_names)
    learners_named = {
        node
        for root in graph.roots
        if root.kind in ("name", "module")
        for node in root.nodes
        if graph.nodes[node].kind == "learner"
    }
    named = reach(graph, learners_named)
    held = {root: holder.reaches for holder in rows if not holder.is_shared for root in holder.roots}
    found = [n for n, root in enumerate(graph.roots) if held.get(n) and root.label not in errors and _is_handle(facts, root)]
    owners = owners_of_nodes(graph, [graph.roots[n].nodes for n in found])
    unnamed = {n for n, node in enumerate(graph.nodes) if node.kind in ("learner", "model") and n not in named}
    of_unnamed = reduce(or_, (owners[n] for n in unnamed), 0)
    told = set[str]()  # an executor and its thread have one line
    for number in (found[place] for place in bits_of(of_unnamed)):
        root = graph.roots[number]
        release = _release_of(graph, root, unnamed)
        if release.targets and release.cut:  # it may keep more than one
            release = release_of_alike(graph, root) or release
        release = replace(release, frees=promised(facts, (release,))) if release.command else release
        if root.kind in ("module", "library") and release.frees is not None and release.frees < held[number]:  # not all of it
            release = release_of_root(facts, root)
        if release.frees == 0 or (release.command and release.command in told):  # something else needs it, or has said it
            continue
        told.add(release.command)
        yield Handle(root=number, nbytes=held[number], advice=release)


def _release_of(graph: Graph, root: Root, experiments: Set[int]) -> Advice:
    """Return the line that lets go of the experiments behind a root; none that does not run as it stands."""
    cleared = release_of_way(graph, root, shortest_path(graph, root, experiments))
    if cleared.cut or root.kind not in ("name", "out"):
        return cleared if cleared.is_code or not cleared.command else advice.NONE
    return advice.release_names((root.label,))


def _is_handle(facts: Facts, root: Root) -> bool:
    """Say whether a name stands for one object that is neither an experiment nor a container of the user's."""
    nodes = [facts.graph.nodes[node] for node in root.nodes]
    may_contain = root.kind == "library"
    return all(node.kind in ("object", "code", "cell") and (may_contain or node.type_name not in _CONTAINERS) for node in nodes)
