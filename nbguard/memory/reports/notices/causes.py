"""Diagnosis of notices by the facts of one scan: the holders of the remains, unless wanted or waiting for the collector."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nbguard.memory.cleanup.plan.promises import freed_by, joined, needed, promised, with_release
from nbguard.memory.core.advice import ONLY_WITH_KERNEL, Advice, copy_of_view, release_names
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Graph, Root
from nbguard.memory.core.references.explain import Path, Why, explain, path_to
from nbguard.memory.core.references.graph import GRAPH, nbytes_of, reach, reach_of_roots, shortest_path, storages_of
from nbguard.memory.core.references.owner_sets import bits_of
from nbguard.memory.core.references.releases import detached
from nbguard.memory.reports.notices.notice import NOT_SHOWN, Departure, Notice, StorageKey

_KEY = re.compile(r"\[[^\]]*\]")
_WAYS = 20
"""Most ways to a thing that one command cuts each by itself; of more, the names at their beginnings are released."""
_SMALL = 4
"""A view is small if its storage is so many times as large."""
_OWNERS = frozenset({"learner", "model", "tensor", "data"})
"""Kinds of objects that own the memory they lead to. Others only refer to it: an optimizer, a list, a loader."""
_USERS = frozenset({"name", "module", "frame"})
"""Kinds of roots whose objects the user's own code goes on to use."""
_SERVANTS = frozenset({"graph", "optimizer"})
"""Kinds of objects that keep memory for the sake of others."""

HeldStorages = Mapping[StorageKey, tuple[int, frozenset[str]]]
"""Bytes of each storage that something holds, and the labels of the roots that do."""


@dataclass(frozen=True, kw_only=True)
class _Left:
    """The remains of one object whose name is gone, and the ways to them."""

    gone: Departure
    storages: frozenset[int]  # numbers of those that are left
    paths: tuple[Path, ...]  # the most telling first
    is_complete: bool = True  # there are no other ways
    is_whole: bool = False  # the object itself is alive
    notice: Notice | None = None  # where that is made otherwise: a view keeps it, or something that Python does not show


def diagnose_departures(
    analysis: Analysis, departures: Iterable[Departure], least: int, views: Mapping[str, int]
) -> Iterator[tuple[Notice, tuple[Departure, ...]]]:
    """Yield the notices on the names that one cell has deleted or bound again: one for all those that one root holds."""
    groups = dict[tuple[str, ...], list[_Left]]()
    for gone in sorted(departures, key=lambda one: -one.nbytes):  # the whole before its parts
        left = _left_of(analysis, gone, least, views)
        if left is not None:
            own = (gone.name,) if left.notice is not None else left.paths[0].steps[:1]
            groups.setdefault((str(gone.is_rebound), str(left.notice is not None), *own), []).append(left)
    for group in groups.values():
        yield _notice(analysis, group), tuple(left.gone for left in group)


def diagnose_departure(analysis: Analysis, gone: Departure, least: int, views: Mapping[str, int]) -> Notice | None:
    """Return the notice on a name that is gone, or None if all that is left is wanted or goes with the next collection."""
    return diagnose_again(analysis, (gone,), least, views)


def diagnose_again(analysis: Analysis, departures: Iterable[Departure], least: int, views: Mapping[str, int]) -> Notice | None:
    """Return the notice that has told of these names as it would be told now; None if nothing is left of them."""
    found = [left for gone in departures if (left := _left_of(analysis, gone, least, views)) is not None]
    return _notice(analysis, found) if found else None


def explain_departure(analysis: Analysis, gone: Departure, views: Mapping[str, int]) -> Why:
    """Return the remains of the object that a deleted name was bound to, and all ways to them."""
    facts, graph = analysis.facts, analysis.facts.graph
    alive = storage_numbers(graph, gone.storages)
    left, node = _left_of(analysis, gone, 1, views), _node_of(analysis, gone.ref, alive)
    if node is not None and (left is None or left.notice is None):
        why = explain(facts, gone.name, node, gone.type_name)
        return with_release(facts, _gone_as(why, gone))
    paths, storages = ((), frozenset[int]()) if left is None else (left.paths, left.storages)
    if left is None:  # objects that wait for the collector, and parts that had names of their own and have them still
        waiting = {n for n, root in enumerate(graph.roots) if root.kind == "garbage"}
        named = {n for n, root in enumerate(graph.roots) if root.kind == "name" and _is_a_part(graph, root, gone)}
        owners = {n: {*bits_of(analysis.storage_owners[n])} for n in alive}
        storages = frozenset(n for n, own in owners.items() if own and (waiting >= own or named & own))
        roots = {root for n in storages for root in owners[n] if root in named or root in waiting}
        paths = tuple(paths_to(facts, None, set(storages), roots)[0]) if storages else ()
    nbytes = left.notice.nbytes if left is not None and left.notice is not None else nbytes_of(graph, storages)
    return with_release(facts, _gone_as(Why(name=gone.name, what=gone.type_name, nbytes=nbytes, paths=paths), gone))


def _gone_as(why: Why, gone: Departure) -> Why:
    return replace(why, deleted=gone.cell, released_by=gone.released_by, is_between_cells=gone.is_between_cells)


def _left_of(analysis: Analysis, gone: Departure, least: int, views: Mapping[str, int]) -> _Left | None:
    """Return the remains of an object whose name is gone, or None if they are less than `least` bytes.

    Memory that the next collection frees is left out, and so is wanted memory: it has a name of its own, or the name's new
    object or the one whose part it was leads to it. Where the object itself is gone, or only referred to the memory of others,
    memory that any name uses is wanted, too (`_used`). `views` are the bytes of tensors by their names.
    """
    graph = analysis.facts.graph
    alive = storage_numbers(graph, gone.storages)
    held_by = {storage: roots_of(analysis, storage) for storage in alive}
    node = _node_of(analysis, gone.ref, alive)
    if view := _of_view(analysis, gone, held_by, views, least):
        return view
    names = [(n, root) for n, root in enumerate(graph.roots) if root.kind == "name"]
    wanted = {n for n, root in names if _is_wanted(graph, root, gone, node)}
    left = {storage for storage, roots in held_by.items() if roots and not roots & wanted}
    if node is None:
        left -= analysis.once(_used)
    holding = frozenset(n for storage in left for n in held_by[storage])
    if node is not None:  # holders of the object itself; memory that others share with it is theirs
        holding &= _holding(graph, analysis.node_owners[node])
        apart = {storage for storage in left if held_by[storage] <= holding}
        is_owner = graph.nodes[node].kind in _OWNERS
        shared = {storage for storage in left if held_by[storage] & holding} if is_owner else set[int]()
        left = apart if nbytes_of(graph, apart) >= least else shared
    hidden = gone.nbytes - nbytes_of(graph, alive) if graph.rest is None else 0
    if nbytes_of(graph, left) < least:
        return None if hidden < least else _hidden(gone, hidden, graph, alive)
    paths, is_complete = paths_to(analysis.facts, node, left, holding)
    return _Left(gone=gone, storages=frozenset(left), paths=tuple(paths), is_complete=is_complete, is_whole=node is not None)


def held_storages(analysis: Analysis) -> HeldStorages:
    """Return the storages of a scan that something holds, without those that only wait for the collector."""
    graph = analysis.facts.graph
    labels = {n: root.label for n, root in enumerate(graph.roots)}
    held_by = ((storage, roots_of(analysis, n)) for n, storage in enumerate(graph.storages))
    return {
        (storage.device, storage.address): (storage.nbytes, frozenset(map(labels.__getitem__, roots)))
        for storage, roots in held_by
        if roots
    }


def telling_path(analysis: Analysis, label: str, keys: Collection[StorageKey]) -> Path:
    """Return the way from the root with a label to the largest of these storages that it leads to."""
    graph = analysis.facts.graph
    roots = [n for n, root in enumerate(graph.roots) if root.label == label]
    return paths_to(analysis.facts, None, storage_numbers(graph, keys), roots)[0][0]


def storage_numbers(graph: Graph, keys: Collection[StorageKey]) -> set[int]:
    """Return the numbers of these storages in a graph, as far as it has them."""
    return {n for n, storage in enumerate(graph.storages) if (storage.device, storage.address) in keys}


def roots_of(analysis: Analysis, storage: int) -> frozenset[int]:
    """Return the numbers of the roots that lead to a storage, but for those that end by themselves."""
    return _holding(analysis.facts.graph, analysis.storage_owners[storage])


def _holding(graph: Graph, owners: int) -> frozenset[int]:
    return frozenset(n for n in bits_of(owners) if graph.roots[n].kind != "garbage" and not graph.roots[n].is_ending)


def _node_of(analysis: Analysis, ref: int, alive: set[int]) -> int | None:
    """Return the node of the object that had the id `ref`, if something holds it, so that it leads to the same as then."""
    graph = analysis.facts.graph
    node = next((n for n, fact in enumerate(graph.nodes) if fact.ref == ref), None) if ref else None
    if node is None or not _holding(graph, analysis.node_owners[node]):
        return None
    return node if alive & storages_of(graph, reach(graph, (node,))) else None


def _is_a_part(graph: Graph, root: Root, gone: Departure) -> bool:
    """Say whether a name is that of a part of the object, which it had besides."""
    return any(graph.nodes[node].ref in gone.named for node in root.nodes)


def _is_wanted(graph: Graph, root: Root, gone: Departure, node: int | None) -> bool:
    """Say whether a name stands for the user's present part of the object: its new value, or a part with a name of its own.

    Or it is the name that the gone one was bound from, `m = learn.model`, or another name of the object itself, given
    before its first name went on to something new, `best = model; model = Net()`, or by the cell that deleted that one.
    """
    has_name = node in root.nodes and (gone.is_rebound or root.cell == gone.cell)
    return root.label in (gone.name, gone.alias_of) or has_name or (node is None and _is_a_part(graph, root, gone))


def _used(analysis: Analysis) -> frozenset[int]:
    """Return the storages that names, the user's modules or running code use: not by way of a graph, nor of an optimizer.

    An optimizer is there for the parameters of a model: memory that it alone still refers to is used by nothing else.
    """
    graph = analysis.facts.graph
    blocked = {n for n, node in enumerate(graph.nodes) if node.kind in _SERVANTS}
    starts = (node for root in graph.roots if root.kind in _USERS for node in root.nodes)
    return frozenset(storages_of(graph, reach(graph, starts, blocked=blocked)))


def _of_view(
    analysis: Analysis, gone: Departure, held_by: Mapping[int, frozenset[int]], views: Mapping[str, int], least: int
) -> _Left | None:
    """Return the remains kept by the only tensor with a name that keeps the storage alive and is a small part of it."""
    graph = analysis.facts.graph
    kept = {storage: next(iter(roots)) for storage, roots in held_by.items() if len(roots) == 1}
    for number in set(kept.values()):
        root = graph.roots[number]
        shown = {storage for node in root.nodes for storage in graph.nodes[node].storages}  # not those behind its graph
        nbytes = nbytes_of(graph, (storage for storage, n in kept.items() if n == number and storage in shown))
        own = views.get(root.label)
        if root.kind != "name" or own is None or nbytes < max(least, own * _SMALL):
            continue
        has_graph = any(graph.nodes[child].kind == "graph" for n in root.nodes for child in graph.nodes[n].children)
        storages = frozenset(storage for storage, n in kept.items() if n == number)
        line = copy_of_view(root.label, has_graph=has_graph, frees=nbytes - own)
        notice = Notice(
            kind="view",
            name=gone.name,
            names=(gone.name,),
            cell=gone.cell,
            nbytes=nbytes,
            holders=(root.label,),
            holder_kind=root.kind,
            advice=(line,),
            frees=nbytes - own,
            shape=_event(gone, f"view {root.label}"),
            bound=gone.bound,
            holder_cell=root.cell,
            view_nbytes=own,
            storages=_keys(graph, storages),
            roots=frozenset({root.label}),
        )
        path = Path(steps=(root.label,), cell=root.cell, stale=False, advice=line, storages_only=True)
        return _Left(gone=gone, storages=storages, paths=(path,), notice=notice)
    return None


def _hidden(gone: Departure, nbytes: int, graph: Graph, alive: set[int]) -> _Left:
    """Return the remains kept by something that Python does not show: memory that is alive, and that no scan met."""
    notice = Notice(
        kind="rebound" if gone.is_rebound else "deleted",
        name=gone.name,
        names=(gone.name,),
        cell=gone.cell,
        nbytes=nbytes,
        holders=(NOT_SHOWN,),
        advice=(),
        is_for_good=True,
        shape=_event(gone, NOT_SHOWN),
        bound=gone.bound,
        storages=gone.storages - _keys(graph, alive),
    )
    return _Left(gone=gone, storages=frozenset(), paths=(), notice=notice)


def paths_to(facts: Facts, node: int | None, left: set[int], roots: Collection[int]) -> tuple[list[Path], bool]:
    """Return a way from each of these roots to the object or, where it has none, to its storages; and whether that is all."""
    graph = facts.graph
    labels = {graph.roots[n].label for n in roots}
    paths, more = list[Path](), False
    if node is not None:
        why = explain(facts, "", node, "", per_root=_WAYS)
        paths = [path for path in why.paths if path.steps[0] in labels]
        more = any(label in labels for label, _ in why.more)
    reached = {path.steps[0] for path in paths}
    largest = max(graph.storages[storage].nbytes for storage in left)
    carriers = {n for n, fact in enumerate(graph.nodes) if left.intersection(fact.storages)}
    telling = {n for n in carriers if nbytes_of(graph, left.intersection(graph.nodes[n].storages)) * _SMALL > largest}
    for number in sorted(roots):
        root = graph.roots[number]
        if root.label not in reached:
            way = shortest_path(graph, root, telling) or shortest_path(graph, root, carriers)
            paths.append(path_to(graph, root, way))
            more = more or len(carriers) > 1
    return paths, not more


def _notice(analysis: Analysis, found: Sequence[_Left]) -> Notice:
    """Return the notice on the remains of some objects, whose names one cell has deleted or bound again."""
    if found[0].notice is not None:
        return found[0].notice
    graph, gone = analysis.facts.graph, found[0].gone
    left = {storage for one in found for storage in one.storages}
    is_complete, is_whole = all(one.is_complete for one in found), all(one.is_whole for one in found)
    paths = list({path.text: path for one in found for path in one.paths}.values())
    roots = {root.label: root for root in graph.roots}
    cuts = partial(_cuts, graph, roots=roots, is_complete=is_complete)
    lines = cuts(paths)
    own = [path for path in paths if roots[path.steps[0]].kind != "library"]
    by_path = any(path.advice.targets for path in paths if path not in own)  # a library that has no line of its own for it
    if own and (not lines or by_path):
        its = cuts(own)  # a library may have the objects of these lines as well: a queue, with its threads
        if its and left <= (freed_by(analysis.facts, its) or set()):
            paths, lines = own, its
    first, lines = paths[0], needed(analysis.facts, lines)
    freed = freed_by(analysis.facts, lines) if lines else None
    is_shared = freed is not None and not left <= freed  # however much of something else these lines free
    if is_shared or (not is_whole and _deletes_what_is_in_use(analysis, lines)):
        lines = []
    if not lines or all(GRAPH in path.text for path in paths):  # a result that is needed keeps its value without its graph
        graphs = [detached(graph, roots[label]) for label in dict.fromkeys(path.steps[0] for path in paths)]
        if all(line.command for line in graphs) and left <= (freed_by(analysis.facts, graphs) or set()):
            lines, is_shared = graphs, False
    others = _others(analysis, left, paths) if is_shared else ()
    holder = roots[first.steps[0]]
    names = tuple(dict.fromkeys(one.gone.name for one in found))
    return Notice(
        kind="rebound" if gone.is_rebound else "deleted",
        name=gone.name,
        beside=names[1:],
        names=names,
        times=len(names),
        cell=gone.cell,
        nbytes=nbytes_of(graph, left),
        holders=tuple(dict.fromkeys((*(_holder(path, roots[path.steps[0]]) for path in paths), *others))),
        holder_kind=holder.kind,
        advice=joined(lines),
        registered=first.times if "_hooks" in first.text else 1,
        is_for_good=not lines and all(path.advice == ONLY_WITH_KERNEL for path in paths),
        frees=promised(analysis.facts, lines) if lines else None,
        shape=_event(gone, shape_of(graph, first) if holder.is_shown else NOT_SHOWN),
        bound=gone.bound,
        holder_cell=first.cell,
        is_whole=is_whole,
        keeps_graph=any(GRAPH in step for step in first.steps),
        storages=_keys(graph, left),
        roots=frozenset(graph.roots[n].label for storage in left for n in roots_of(analysis, storage)),
    )


def _event(gone: Departure, holder: str) -> str:
    return f"{gone.name} in In[{gone.cell}]: {holder}"


def _keys(graph: Graph, numbers: Iterable[int]) -> frozenset[StorageKey]:
    return frozenset((graph.storages[n].device, graph.storages[n].address) for n in numbers)


def _others(analysis: Analysis, left: set[int], paths: list[Path]) -> tuple[str, ...]:
    """Return the roots, besides those of the paths, that lead to the remains."""
    known = {path.steps[0] for path in paths}
    labels = (analysis.facts.graph.roots[n].label for storage in sorted(left) for n in sorted(roots_of(analysis, storage)))
    return tuple(label for label in dict.fromkeys(labels) if label not in known)


def _holder(path: Path, root: Root) -> str:
    """Return a way as one would write it; of an error, a frame or a cache, its name alone: the way through it is long."""
    if not root.is_shown:
        return NOT_SHOWN
    return path.text if root.kind in ("name", "module", "out", "library") else root.label


def shape_of(graph: Graph, path: Path) -> str:
    """Return the root of a way and its steps without keys."""
    root = next(root for root in graph.roots if root.label == path.steps[0])
    which = f" (In[{root.cell}])" if root.kind == "error" and root.cell is not None else ""  # the next error is another cause
    return f"{root.kind}: {_KEY.sub('[·]', _holder(path, root))}{which}"


def _cuts(graph: Graph, paths: list[Path], roots: Mapping[str, Root], *, is_complete: bool) -> list[Advice]:
    """Return a line for each way, once; none where one of them cannot be cut by a line, or only with a live model."""
    lines = dict[str, Advice]()
    for path in paths:
        root = roots[path.steps[0]]
        is_one_of_many = (not is_complete or len(paths) > _WAYS) and root.kind == "name"
        is_model = any(graph.nodes[node].kind in ("learner", "model") for node in root.nodes)
        if is_one_of_many and is_model and len(path.steps) > 1 and "_hooks" in path.text:
            return []
        line = release_names((root.label,)) if is_one_of_many else path.advice
        if root.kind == "frame" or not line.is_code:
            return []
        lines[line.command] = line
    return list(lines.values())


def _deletes_what_is_in_use(analysis: Analysis, lines: list[Advice]) -> bool:
    """Say whether one of the names that these lines delete is itself in use, as it leads to objects of other names."""
    graph = analysis.facts.graph
    names = {line.ends for line in lines} | {text for line in lines for text in line.targets}
    gone = [n for n, root in enumerate(graph.roots) if root.label in names]
    return not analysis.once(_used).isdisjoint(storages_of(graph, reach_of_roots(graph, gone)))
