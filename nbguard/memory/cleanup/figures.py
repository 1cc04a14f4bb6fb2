"""The figures of a holder for every surface: the bytes that its release gives back, alone and with others.

The bytes of a row come back by its release, by the plan that the release carries out. They add up to the held bytes. Where a
displayed result keeps memory of a name (a view of it, a loss with its graph), the name does not give it back: both hold it.
Where a stale holder has to go with a name (the last error's `loss`, whose graph leads to the model), that holder's own bytes
come back with the name, and are the name's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import freed_by_targets, plan_cleanup
from nbguard.memory.core.advice import NONE, Advice, release_names
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import Graph
from nbguard.memory.core.least_shown import least_of_rows
from nbguard.memory.core.references.graph import STALE_KINDS, nbytes_of
from nbguard.memory.core.references.holders import Holder, Holding, shared_row
from nbguard.memory.core.references.owner_sets import bits_of
from nbguard.memory.core.target import Target

_RELEASED = frozenset({"name", "out"})
"""Kinds of roots that a command releases by their label."""
_MOST_GROUPS = 24
"""Most rows whose partners are looked for, the largest first, as each takes some plans."""
_KEEPERS = 2
"""Holders that are named where no command releases them."""


def targets_of_roots(graph: Graph, roots: Sequence[int]) -> tuple[Target, ...]:
    """Return the targets that release these roots; none where a command cannot name one of them."""
    if not roots or any(graph.roots[root].kind not in _RELEASED for root in roots):
        return ()
    return tuple(Target(text=graph.roots[root].label, root=graph.roots[root].label) for root in roots)


def freed_with_stale(analysis: Analysis) -> Mapping[tuple[int, ...], frozenset[int]]:
    """Return, by the roots of a row, the storages that its release frees, where stale holders have to do with them.

    Of all other rows it frees those which the row alone holds. A question for `Analysis.once`.
    """
    graph = analysis.facts.graph
    owners = analysis.storage_owners
    stale = sum(1 << number for number, root in enumerate(graph.roots) if root.kind in STALE_KINDS)
    found = {}
    for row, storages in analysis.holdings:
        if row.is_shared or not targets_of_roots(graph, row.roots):
            continue
        own = sum(1 << root for root in row.roots)
        entries = {node for root in row.roots for node in graph.roots[root].nodes}
        of_row = storages if row.kind == "name" else {n for n, mask in enumerate(owners) if mask & own}
        beside = {number for n in of_row for number in bits_of(owners[n] & stale & ~own)}
        if any(graph.roots[number].kind != "out" or not entries.issuperset(graph.roots[number].nodes) for number in beside):
            found[row.roots] = freed_by_targets(analysis.facts, targets_of_roots(graph, row.roots))
    return found


def holdings_of(analysis: Analysis) -> tuple[Holding, ...]:
    """Return the holders among Python's objects on all devices together, largest first. A question for `Analysis.once`."""
    rows = _by_plans(analysis, analysis.holdings)
    least = least_of_rows(row.retained for row, _ in rows)
    shared = [each for each in rows if each[0].is_shared and each[0].retained >= least]
    alone = [row for row, _ in rows if row.kind in _RELEASED and row.retained < least <= row.reaches]
    groups = {row.roots: _group_of(analysis, row, storages) for row, storages in shared[:_MOST_GROUPS]}
    for row in sorted(alone, key=lambda row: -row.reaches)[:_MOST_GROUPS]:
        around = [groups[roots] for roots in groups if {*row.roots} < {*roots} and groups[roots].command]
        groups[row.roots] = _beside(analysis, row, around)
    return tuple((replace(row, together=groups.get(row.roots, NONE)), storages) for row, storages in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFigure:
    """The bytes that the release of something gives back."""

    frees: int  # bytes, by its plan
    together: Advice = NONE  # frees its memory with all else that has to go, where the release frees next to none


def figure_of(analysis: Analysis, targets: tuple[Target, ...]) -> ReleaseFigure:
    """Return the figure of targets: of a name or a displayed result that of its row."""
    roots = {target.root for target in targets if target.root == target.text}
    for row, _ in analysis.once(holdings_of):
        if len(roots) == len(targets) and roots == {*row.names}:
            return ReleaseFigure(frees=row.frees, together=row.together)
    plan = plan_cleanup(analysis.facts, Request(targets=targets))
    return ReleaseFigure(frees=plan.promised, together=next((kept.instead for kept in plan.kept), NONE))


def holdings_on(device: DeviceAnalysis) -> tuple[Holding, ...]:
    """Return the holders among Python's objects of bytes on one device, largest first. A question for `DeviceAnalysis.once`."""
    everywhere = device.analysis.once(holdings_of)
    if device.holdings is device.analysis.holdings:
        return everywhere
    groups = {row.roots: row.together for row, _ in everywhere}
    rows = _by_plans(device.analysis, device.holdings)
    return tuple((replace(row, together=groups.get(row.roots, NONE)), storages) for row, storages in rows)


def _beside(analysis: Analysis, row: Holder, around: Sequence[Advice]) -> Advice:
    """Return the command that frees memory of a name that alone frees next to none, with the other names that have to go.

    `around` are the lines that release those who share its memory, the largest share first. Without any, say why not.
    """
    kept = plan_cleanup(analysis.facts, Request(targets=targets_of_roots(analysis.facts.graph, row.roots))).kept
    lines = [*(each.instead for each in kept if each.instead.command), *around]
    if lines or not kept:
        return lines[0] if lines else NONE
    return Advice(command="", effect=", ".join(keeper.words for keeper in kept[0].keepers[:_KEEPERS]))


def _group_of(analysis: Analysis, row: Holder, storages: Set[int]) -> Advice:
    """Return the command that releases all holders of shared memory; none where one of them cannot be released."""
    graph = analysis.facts.graph
    targets = targets_of_roots(graph, row.roots)
    freed = freed_by_targets(analysis.facts, targets) if targets else frozenset[int]()
    if not freed or not storages <= freed:
        return NONE
    return release_names([target.text for target in targets], nbytes_of(graph, freed))


def _by_plans(analysis: Analysis, rows: Sequence[Holding]) -> tuple[Holding, ...]:
    """Return the rows with each storage given to the row whose release frees it, or to those that hold it together."""
    graph, freed = analysis.facts.graph, analysis.once(freed_with_stale)
    if not freed:
        return tuple(rows)
    claims = _claims(freed)
    own: dict[tuple[int, ...], set[int]] = {row.roots: set() for row, _ in rows}
    common: dict[tuple[int, ...], set[int]] = {}
    for row, storages in rows:
        for storage in storages:
            if row.roots in freed:
                keepers = [] if storage in freed[row.roots] else _shown_beside(analysis, row, storage)
                of_all = common.setdefault((*row.roots, *keepers), set()) if keepers else own[row.roots]
                of_all.add(storage)
            else:
                own[_claimant(graph, row, claims.get(storage, ()), own)].add(storage)
    by_roots = {row.roots: row for row, _ in rows}
    here = frozenset[int]().union(*(storages for _, storages in rows))
    found = [
        (_with_share(graph, by_roots[roots], share, None if roots not in freed else freed[roots] & here), frozenset(share))
        for roots, share in own.items()
        if share or by_roots[roots].kind not in STALE_KINDS | {"shared"}
    ]
    found += [(_common(graph, by_roots, roots, share), frozenset(share)) for roots, share in common.items()]
    return tuple(sorted(found, key=lambda row: (-row[0].retained, -row[0].reaches, row[0].label)))


def _claims(freed: Mapping[tuple[int, ...], frozenset[int]]) -> dict[int, list[tuple[int, ...]]]:
    """Return, by storage, the rows (by their roots) whose release frees it."""
    claims: dict[int, list[tuple[int, ...]]] = {}
    for roots, storages in freed.items():
        for storage in storages:
            claims.setdefault(storage, []).append(roots)
    return claims


def _shown_beside(analysis: Analysis, row: Holder, storage: int) -> list[int]:
    """Return the displayed results that keep a storage of a row when the row is released."""
    roots = analysis.facts.graph.roots
    return [root for root in bits_of(analysis.storage_owners[storage]) if root not in row.roots and roots[root].kind == "out"]


def _claimant(
    graph: Graph, row: Holder, claims: Sequence[tuple[int, ...]], known: Collection[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the roots of the row that a storage of `row` belongs to: the only one to free it, if `row` is stale."""
    is_stale = graph.roots[row.roots[0]].kind in STALE_KINDS and row.kind != "out"
    return claims[0] if is_stale and len(claims) == 1 and claims[0] in known else row.roots


def _with_share(graph: Graph, row: Holder, share: Set[int], freed: Set[int] | None) -> Holder:
    """Return a row of these storages, whose release frees `freed`, or just these if None."""
    nbytes = nbytes_of(graph, share)
    return replace(row, retained=nbytes, frees=nbytes if freed is None else nbytes_of(graph, freed))


def _common(graph: Graph, rows: Mapping[tuple[int, ...], Holder], roots: tuple[int, ...], share: Set[int]) -> Holder:
    """Return the row of memory that a name holds together with displayed results which its release leaves."""
    nbytes = nbytes_of(graph, share)
    name = next(row.label for own, row in rows.items() if own == roots[: len(own)] and not row.is_shared)
    shown = [graph.roots[root].label for root in roots if graph.roots[root].kind == "out"]
    labels = [name, *(label for label in shown if label != name)]
    return shared_row(labels, nbytes, roots)
