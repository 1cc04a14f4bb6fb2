"""The figures of a holder for every surface: the bytes that its release gives back, alone and with others.

The bytes of a row come back by its release, by the plan that the release carries out. They add up to the held bytes. Where a
displayed result keeps memory of a name (a view of it, a loss with its graph), the name does not give it back: both hold it.
Where a stale holder has to go with a name (the last error's `loss`, whose graph leads to the model), that holder's own bytes
come back with the name, too, but stay in the stale holder's row: a plain cleanup frees them, and loses no name for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from nbguard.memory.cleanup.plan.optional_steps import held_by_errors, kept_errors
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import freed_by_targets, plan_cleanup
from nbguard.memory.cleanup.plan.promises import freed_by, promised
from nbguard.memory.core import advice
from nbguard.memory.core.advice import NONE, Advice, least_of_rows, release_names
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import Facts, Graph, Root, Target
from nbguard.memory.core.references.graph import STALE_KINDS, Edge, nbytes_of, reach, shortest_path, storages_of
from nbguard.memory.core.references.holders import Holder, Holding, shared_row, with_values
from nbguard.memory.core.references.owner_sets import bits_of, contents_of, owners_of_nodes
from nbguard.memory.core.references.releases import alike, joined, release_of_alike, release_of_way, releases_of_root

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
    return tuple((with_values(row, together=groups.get(row.roots, NONE)), storages) for row, storages in rows)


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
    return tuple((with_values(row, together=groups.get(row.roots, NONE)), storages) for row, storages in rows)


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
    together = _release_of_roots(analysis, row.roots, storages)
    if together.command:
        return together
    shown = sorted({root for storage in storages for root in _shown_beside(analysis, row, storage)})
    return _release_of_roots(analysis, (*row.roots, *shown), storages) if shown else NONE


def _release_of_roots(analysis: Analysis, roots: Sequence[int], storages: Set[int]) -> Advice:
    graph = analysis.facts.graph
    targets = targets_of_roots(graph, roots)
    freed = freed_by_targets(analysis.facts, targets) if targets else frozenset[int]()
    if not freed or not storages <= freed:
        return NONE
    return release_names([target.text for target in targets], nbytes_of(graph, freed))


def _by_plans(analysis: Analysis, rows: Sequence[Holding]) -> tuple[Holding, ...]:
    """Return the rows with each storage given to the row whose release frees it, or to those that hold it together."""
    graph, freed = analysis.facts.graph, analysis.once(freed_with_stale)
    if not freed:
        return tuple(rows)
    own: dict[tuple[int, ...], set[int]] = {row.roots: set() for row, _ in rows}
    common: dict[tuple[int, ...], set[int]] = {}
    for row, storages in rows:
        for storage in storages:
            if row.roots in freed:
                keepers = [] if storage in freed[row.roots] else _shown_beside(analysis, row, storage)
                of_all = common.setdefault((*row.roots, *keepers), set()) if keepers else own[row.roots]
                of_all.add(storage)
            else:
                own[row.roots].add(storage)
    by_roots = {row.roots: row for row, _ in rows}
    here = frozenset[int]().union(*(storages for _, storages in rows))
    found = [
        (_with_share(graph, by_roots[roots], share, None if roots not in freed else freed[roots] & here), frozenset(share))
        for roots, share in own.items()
        if share or by_roots[roots].kind not in STALE_KINDS | {"shared"}
    ]
    found += [(_common(graph, by_roots, roots, share), frozenset(share)) for roots, share in common.items()]
    return tuple(sorted(found, key=lambda row: (-row[0].retained, -row[0].reaches, row[0].label)))


def _shown_beside(analysis: Analysis, row: Holder, storage: int) -> list[int]:
    """Return the displayed results that keep a storage of a row when the row is released."""
    roots = analysis.facts.graph.roots
    return [root for root in bits_of(analysis.storage_owners[storage]) if root not in row.roots and roots[root].kind == "out"]


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


# --- The line that ends each holder, or the reason why there is none. Findings and cleanups show the same. Pure.


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
    of_row = frozenset[int]().union(*(storages for row, storages in analysis.once(holdings_of) if row.roots == holder.roots))
    roots = tuple(number for number in holder.roots if not _is_made_class(facts.graph.roots[number])) or holder.roots
    alone = {number: way_out(analysis, rows[number]) for number in roots[:_MOST_TRIED] if number in rows}
    for line in alone.values():
        if line.is_code and of_row and of_row <= _freed(analysis, (line,)):
            return line
    if len(roots) == 1:
        root = facts.graph.roots[roots[0]]
        return advice.delete_name(root.label) if root.kind == "name" else _SHARED
    lines = [alone.get(number, advice.NONE) for number in holder.roots]
    if all(line.targets for line in lines):
        together = advice.release_names([*dict.fromkeys(text for line in lines for text in line.targets)])
        if of_row and of_row <= (freed := _freed(analysis, lines)):
            frees = nbytes_of(facts.graph, freed)
            return replace(together, frees=frees, cut=frozenset[Edge]().union(*(line.cut for line in lines)))
    freeing = [line for line in alone.values() if line.is_code]
    shares = [nbytes_of(facts.graph, of_row & _freed(analysis, (line,))) for line in freeing]
    most, line = max(zip(shares, freeing, strict=True), default=(0, _SHARED), key=lambda found: found[0])
    return replace(line, frees=nbytes_of(facts.graph, _freed(analysis, (line,)))) if most else _SHARED


def _freed(analysis: Analysis, lines: Sequence[Advice]) -> Set[int]:
    """Return the storages that lines free, none where that is not known. They are worked out once, as holders share them."""
    known, key = analysis.once(_known_to_free), tuple(lines)
    if key not in known:
        known[key] = frozenset(freed_by(analysis.facts, key) or ())
    return known[key]


def _known_to_free(_: Analysis) -> dict[tuple[Advice, ...], Set[int]]:
    return {}


def _is_made_class(root: Root) -> bool:
    """Say whether a root is a class that a library made while the code ran, such as a mock's. It goes with its objects."""
    return root.is_class and not root.module


def release_of_root(facts: Facts, root: Root) -> Advice:
    """Return the line that lets go of the contents of a module's global, a library or a registry, with its bytes.

    Where another such root has the same contents, the line lets both go of them: one alone frees nothing.
    """
    lines = _lines_of_root(facts.graph, root)
    if lines and not (frees := promised(facts, lines)):
        every = [line for each in _roots_of_contents(facts.graph, root) for line in _lines_of_root(facts.graph, each)]
        lines = [line for line in every if bool(line.targets) == bool(lines[0].targets)]
        frees = promised(facts, lines)
    if not lines or not frees:
        return _reason(facts.graph, root)
    release, effects = joined(facts.graph, lines, frees), {line.effect for line in lines}
    return replace(release, effect=lines[0].effect) if len(effects) == 1 else release


def _lines_of_root(graph: Graph, root: Root) -> Sequence[Advice]:
    lines = releases_of_root(graph, root)
    return alike(lines) if lines and lines[0].command else ()


def _roots_of_contents(graph: Graph, root: Root) -> list[Root]:
    """Return the roots in libraries and modules that lead to memory of `root`, itself among them, in the order of the scan."""
    storages = storages_of(graph, reach(graph, root.nodes))
    found = (each for each in graph.roots if each.kind in ("module", "library"))
    return [each for each in found if each is root or storages & storages_of(graph, reach(graph, each.nodes))][:_MOST_TRIED]


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
        is_of_cache = release.effect == advice.EMPTIES_CACHE
        is_elsewhere = root.kind in ("module", "library") or is_of_cache
        if is_elsewhere and release.frees is not None and release.frees < held[number] and not _is_kept_by_names(graph, root):
            release = release_of_root(facts, root)  # that was not all of it
        if release.frees == 0 or (release.command and release.command in told):  # something else needs it, or has said it
            continue
        told.add(release.command)
        yield Handle(root=number, nbytes=held[number], advice=release)


def _is_kept_by_names(graph: Graph, root: Root) -> bool:
    """Say whether other names lead to all memory of a root. Its line frees nothing until they are gone."""
    names = [node for each in graph.roots if each.kind == "name" and each is not root for node in each.nodes]
    return storages_of(graph, reach(graph, root.nodes)) <= storages_of(graph, reach(graph, names))


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
