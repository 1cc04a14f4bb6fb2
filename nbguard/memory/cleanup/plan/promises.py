"""Promises of advice: bytes that lines give back together, by the graph and the plans that the commands use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import freed_by_targets, plan_cleanup
from nbguard.memory.core.advice import Advice, release_names, release_stale
from nbguard.memory.core.facts import Facts, Graph, Target
from nbguard.memory.core.references.explain import Why
from nbguard.memory.core.references.graph import GRAPH, Edge, nbytes_of, reach_of_roots, storages_of, without

_NEEDING = frozenset({"learner", "model"})
"""Kinds of objects that are broken without their contents."""
_FEW = 4
"""Most lines that are each checked for being needed."""


def promised(facts: Facts, lines: Sequence[Advice]) -> int | None:
    """Return the bytes that these lines give back, run one after the other; None where that is not known.

    It is not where the effect of a line is not known, or where a line frees all that is stale and more is about to become so.
    """
    if release_stale() in lines and any(root.is_ending for root in facts.graph.roots):
        return None
    freed = freed_by(facts, lines)
    return None if freed is None else nbytes_of(facts.graph, freed)


def freed_by(facts: Facts, lines: Sequence[Advice]) -> set[int] | None:
    """Return the storages that these lines free, run one after the other; None where the effect of one is not known.

    Cycles that wait for the collector already are none of the lines' doing, whoever collects them; they count only where a line
    frees all that is stale, or has them collected because they keep its memory.
    """
    cleans_up = release_stale() in lines
    code = [line for line in lines if not line.targets and line != release_stale()]
    if not all(line.cut or line.ends for line in code):
        return None
    graph = facts.graph
    left = _without(graph, code)
    targets = tuple(target for line in lines for target in _targets(graph, line))
    freed = freed_by_targets(replace(facts, graph=left), targets) if targets else frozenset[int]()
    if cleans_up:
        left = _without(left, [line for line in lines if line.targets])
        freed |= plan_cleanup(replace(facts, graph=left), Request()).storages
    return _held(graph, cleans_up) - (_held(left, cleans_up) - freed) | freed


def needed(facts: Facts, lines: list[Advice]) -> list[Advice]:
    """Return the lines without those that add nothing to the others; names are spared first. Of many, all."""
    if len(lines) > _FEW or not (nbytes := promised(facts, lines)):
        return lines
    for line in sorted(lines, key=lambda line: not line.targets):
        others = [other for other in lines if other is not line]
        if others and promised(facts, others) == nbytes:
            lines = others
    return lines


def joined(lines: list[Advice]) -> tuple[Advice, ...]:
    """Return the lines in the order of their work: Python, one cleanup with all targets, then the stale rest."""
    targets = tuple(text for line in lines for text in line.targets)
    code = (line for line in lines if not line.targets and line != release_stale())
    stale = (line for line in lines if line == release_stale())
    return (*code, *((release_names(targets),) if targets else ()), *stale)


def with_release(facts: Facts, why: Why) -> Why:
    """Return an explanation with the lines that let go of the thing together, and the bytes that they give back.

    A graph that shares its memory goes along where nothing is free otherwise; nothing else that only shares it does. There
    are no lines where one of the ways cannot be cut by a line, or leads through a model that is not all that has the thing.
    """
    graph, own = facts.graph, [path for path in why.paths if not path.storages_only]
    kinds = {root.label: root.kind for root in graph.roots}
    models = {root.label for root in graph.roots if any(graph.nodes[node].kind in _NEEDING for node in root.nodes)}
    is_one_line = len({path.advice.command for path in own}) == 1
    several = len({path.steps[0] for path in own}) > 1 and not is_one_line
    if several and any(path.steps[0] in models and len(path.steps) > 1 for path in own):
        return why
    sharing = [path for path in why.paths if path.storages_only and GRAPH in path.text and path.steps[0] not in models]
    for paths in filter(None, (own, [*own, *sharing] if sharing else [])):
        lines = dict[str, Advice]()
        for path in paths:
            if kinds.get(path.steps[0]) == "frame" or not path.advice.is_code:
                return why
            lines[path.advice.command] = path.advice
        for label, _ in why.more:
            if kinds.get(label) != "name":
                return why
            parts = (f"{label}.", f"{label}[")
            lines = {key: line for key, line in lines.items() if not any(f"{text}.".startswith(parts) for text in line.targets)}
            lines[label] = release_names((label,))
        chosen = needed(facts, list(lines.values()))
        frees = promised(facts, chosen)
        if chosen and frees != 0:
            return replace(why, release=joined(chosen), released=frees)
    return why


def _held(graph: Graph, collects: bool) -> set[int]:
    """Return the storages that something holds; cycles that wait for the collector count with `collects` only."""
    roots = (n for n, root in enumerate(graph.roots) if collects or root.kind != "garbage")
    return storages_of(graph, reach_of_roots(graph, roots))


def _without(graph: Graph, lines: Sequence[Advice]) -> Graph:
    """Return the graph without the references and the roots that these lines take away."""
    cut = frozenset[Edge]().union(*(line.cut for line in lines))
    labels = {line.ends for line in lines} | {text for line in lines if not line.cut for text in line.targets}
    return without(graph, {number for number, root in enumerate(graph.roots) if root.label in labels}, cut)


def _targets(graph: Graph, line: Advice) -> Iterator[Target]:
    """Yield a cleanup's version of the targets of a line: roots, or the references that it removes."""
    if not line.targets:
        return
    for parent, child in line.cut:
        text = f"{line.targets[0]} {parent} {child}"
        yield Target(text=text, containers=(graph.nodes[parent].ref,), value=graph.nodes[child].ref)
    if not line.cut:
        yield from (Target(text=text, root=text) for text in line.targets)
