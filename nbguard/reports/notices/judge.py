"""Judging notices by the facts of one scan: who holds what is left, unless it is wanted or only waits for the collector."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from nbguard.cleanup.plan.promises import freed_by, promised
from nbguard.memory.advice import Advice, copy_of_view, release_names, release_stale
from nbguard.memory.analysis import Analysis
from nbguard.memory.facts import Facts, Graph, Root
from nbguard.memory.references.explain import Path, explain, path_to
from nbguard.memory.references.graph import GRAPH, nbytes_of, reach, reach_of_roots, shortest_path, storages_of
from nbguard.memory.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages
from nbguard.reports.notices.notice import NOT_SHOWN, Departure, Notice, NoticeKind, StorageKey

_KEY = re.compile(r"\[[^\]]*\]")
_WAYS = 20
"""Most ways to a thing that one command cuts each by itself; of more, the names at their beginnings are released."""
_FEW = 4
"""Lines of which each is asked whether it is needed."""
_SMALL = 4
"""A view is small if its storage is so many times as large."""
_OWNERS = frozenset({"learner", "model", "tensor", "data"})
"""Kinds of objects to which the memory belongs that they lead to. Others refer to it: an optimizer, a list, a loader."""
_USERS = frozenset({"name", "module", "frame"})
"""Kinds of roots from which the user's own code goes on to use what they lead to."""
_SERVANTS = frozenset({"graph", "optimizer"})
"""Kinds of objects that keep memory for the sake of others."""

HeldStorages = Mapping[StorageKey, tuple[int, frozenset[str]]]
"""Bytes of each storage that something holds, and the labels of the roots that do."""


def judge_departure(analysis: Analysis, gone: Departure, least: int, views: Mapping[str, int]) -> Notice | None:
    """Return the notice on a name that has gone; None if nothing is left but what the next collection frees, or is wanted.

    Wanted is what has a name of its own, what the name's new object leads to, or the one whose part it was. Where the object
    itself is gone, or only referred to the memory of others, so is what any name uses (`_used`). `least` are the bytes that are
    worth a notice, `views` the bytes of tensors by their names.
    """
    graph = analysis.facts.graph
    alive = storage_numbers(graph, gone.storages)
    held_by = {storage: _roots_of(analysis, storage) for storage in alive}
    node = _node_of(analysis, gone.ref, alive)
    if notice := _of_view(analysis, gone, held_by, views, least):
        return notice
    names = [(n, root) for n, root in enumerate(graph.roots) if root.kind == "name"]
    wanted = {n for n, root in names if _is_wanted(graph, root, gone, node)}
    left = {storage for storage, roots in held_by.items() if roots and not roots & wanted}
    if node is None:
        left -= analysis.once(_used)
    holding = frozenset(n for storage in left for n in held_by[storage])
    if node is not None:  # who holds the object itself; what others share with it is theirs
        holding &= _holding(graph, analysis.once(_node_owners)[node])
        apart = {storage for storage in left if held_by[storage] <= holding}
        is_owner = graph.nodes[node].kind in _OWNERS
        shared = {storage for storage in left if held_by[storage] & holding} if is_owner else set[int]()
        left = apart if nbytes_of(graph, apart) >= least else shared
    hidden = gone.nbytes - nbytes_of(graph, alive) if graph.rest is None else 0
    if nbytes_of(graph, left) < least:
        return None if hidden < least else _of_hidden(gone, hidden)
    paths, is_complete = _paths(analysis.facts, node, left, holding)
    return _notice("rebound" if gone.is_rebound else "deleted", gone, left, paths, analysis, is_complete, node is not None)


def held_storages(analysis: Analysis) -> HeldStorages:
    """Return the storages of a scan that something holds, without those that only wait for the collector."""
    graph = analysis.facts.graph
    labels = {n: root.label for n, root in enumerate(graph.roots)}
    held_by = ((storage, _roots_of(analysis, n)) for n, storage in enumerate(graph.storages))
    return {
        (storage.device, storage.address): (storage.nbytes, frozenset(map(labels.__getitem__, roots)))
        for storage, roots in held_by
        if roots
    }


def judge_growth(analysis: Analysis, cell: int, former: HeldStorages, least: int) -> Notice | None:
    """Return the notice on a cell that leaves more at each run; None if nothing holds more than after the run before.

    `former` is what was held then.
    """
    graph, held = analysis.facts.graph, analysis.once(held_storages)
    grown = _by_label(held)
    grown.subtract(_by_label(former))
    growing = {label for label, nbytes in grown.items() if nbytes >= least}
    came = {key for key, (_, labels) in held.items() if key not in former and labels & growing}
    nbytes = min(
        sum(held[key][0] for key in came), sum(nbytes for nbytes, _ in held.values()) - sum(n for n, _ in former.values())
    )
    if nbytes < least:
        return None
    left = storage_numbers(graph, came)
    roots = {n for storage in left for n in _roots_of(analysis, storage) if graph.roots[n].label in growing}
    paths, _ = _paths(analysis.facts, None, left, roots)
    paths.sort(key=lambda path: -grown[path.steps[0]])
    return Notice(
        kind="growth",
        name=paths[0].steps[0],
        names=(paths[0].steps[0],),
        cell=cell,
        nbytes=nbytes,
        holders=tuple(dict.fromkeys(path.text.partition(GRAPH)[0] for path in paths)),
        advice=(),
        shape=_shape(graph, paths[0]),
        holder_cell=paths[0].cell,
        keeps_graph=any(GRAPH in step for step in paths[0].steps),
        roots=frozenset(growing),
    )


def telling_path(analysis: Analysis, label: str, keys: Collection[StorageKey]) -> Path:
    """Return the way from the root with a label to the largest of these storages that it leads to."""
    graph = analysis.facts.graph
    roots = [n for n, root in enumerate(graph.roots) if root.label == label]
    return _paths(analysis.facts, None, storage_numbers(graph, keys), roots)[0][0]


def _by_label(held: HeldStorages) -> Counter[str]:
    nbytes = Counter[str]()
    for size, labels in held.values():
        for label in labels:
            nbytes[label] += size
    return nbytes


def storage_numbers(graph: Graph, keys: Collection[StorageKey]) -> set[int]:
    """Return the numbers of these storages in a graph, as far as it has them."""
    return {n for n, storage in enumerate(graph.storages) if (storage.device, storage.address) in keys}


def _roots_of(analysis: Analysis, storage: int) -> frozenset[int]:
    """Return the numbers of the roots that lead to a storage, without what waits for the collector or ends by itself."""
    return _holding(analysis.facts.graph, analysis.once(_storage_owners)[storage])


def _holding(graph: Graph, owners: int) -> frozenset[int]:
    return frozenset(n for n in bits_of(owners) if graph.roots[n].kind != "garbage" and not graph.roots[n].is_ending)


def _node_owners(analysis: Analysis) -> Sequence[int]:
    graph = analysis.facts.graph
    return owners_of_nodes(graph, [root.nodes for root in graph.roots])


def _storage_owners(analysis: Analysis) -> Sequence[int]:
    return owners_of_storages(analysis.facts.graph, analysis.once(_node_owners))


def _node_of(analysis: Analysis, ref: int, alive: set[int]) -> int | None:
    """Return the node of the object that had the id `ref`, if something holds it: it leads to what it led to then."""
    graph = analysis.facts.graph
    node = next((n for n, fact in enumerate(graph.nodes) if fact.ref == ref), None) if ref else None
    if node is None or not _holding(graph, analysis.once(_node_owners)[node]):
        return None
    return node if alive & storages_of(graph, reach(graph, (node,))) else None


def _is_wanted(graph: Graph, root: Root, gone: Departure, node: int | None) -> bool:
    """Say whether a name stands for what the user has of the object now: its new value, or a part with a name of its own.

    Or it is the name by which the one that has gone was bound, `m = learn.model`, or to which the cell itself has moved the
    object: `best = model; model = Net()`.
    """
    is_moved = root.cell == gone.cell and node in root.nodes
    return (
        root.label in (gone.name, gone.alias_of)
        or is_moved
        or (node is None and any(graph.nodes[n].ref in gone.named for n in root.nodes))
    )


def _used(analysis: Analysis) -> frozenset[int]:
    """Return the storages that names, the user's modules or running code use: not by way of a graph, nor of an optimizer.

    An optimizer is there for the parameters of a model: what it alone still refers to, nobody else uses.
    """
    graph = analysis.facts.graph
    blocked = {n for n, node in enumerate(graph.nodes) if node.kind in _SERVANTS}
    starts = (node for root in graph.roots if root.kind in _USERS for node in root.nodes)
    return frozenset(storages_of(graph, reach(graph, starts, blocked=blocked)))


def _of_view(
    analysis: Analysis, gone: Departure, held_by: Mapping[int, frozenset[int]], views: Mapping[str, int], least: int
) -> Notice | None:
    """Return the notice on the one tensor with a name that keeps the storage alive, and is a small part of it."""
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
        return Notice(
            kind="view",
            name=gone.name,
            names=(gone.name,),
            cell=gone.cell,
            nbytes=nbytes,
            holders=(root.label,),
            advice=(copy_of_view(root.label, has_graph=has_graph, frees=nbytes - own),),
            frees=nbytes - own,
            shape=f"view {root.label}",
            bound=gone.bound,
            holder_cell=root.cell,
            view_nbytes=own,
            storages=_keys(graph, (storage for storage, n in kept.items() if n == number)),
            roots=frozenset({root.label}),
        )
    return None


def _of_hidden(gone: Departure, nbytes: int) -> Notice:
    return Notice(
        kind="rebound" if gone.is_rebound else "deleted",
        name=gone.name,
        names=(gone.name,),
        cell=gone.cell,
        nbytes=nbytes,
        holders=(NOT_SHOWN,),
        advice=(),
        shape=f"{NOT_SHOWN}: {gone.name}",
        bound=gone.bound,
    )


def _paths(facts: Facts, node: int | None, left: set[int], roots: Collection[int]) -> tuple[list[Path], bool]:
    """Return a way from each of these roots to the object or, where it has none, to its storages; and whether that is all."""
    graph = facts.graph
    labels = {graph.roots[n].label for n in roots}
    paths, more = list[Path](), False
    if node is not None:
        why = explain(facts, "", node, "")
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


def _notice(
    kind: NoticeKind, gone: Departure, left: set[int], paths: list[Path], analysis: Analysis, is_complete: bool, is_whole: bool
) -> Notice:
    graph = analysis.facts.graph
    roots = {root.label: root for root in graph.roots}
    lines = _cuts(paths, roots, is_complete)
    if not lines and (own := [path for path in paths if roots[path.steps[0]].kind != "library"]):
        lines = _cuts(own, roots, is_complete)  # what these lines empty a library may have as well: a queue, with its threads
        is_enough = bool(lines) and left <= (freed_by(analysis.facts, lines) or set())
        paths, lines = (own, lines) if is_enough else (paths, [])
    first, lines = paths[0], _needed(analysis.facts, lines)
    freed = freed_by(analysis.facts, lines) if lines else None
    is_shared = freed is not None and not left <= freed  # however much of something else these lines free
    if is_shared or (not is_whole and _deletes_what_is_in_use(analysis, lines)):
        lines = []
    others = _others(analysis, left, paths) if is_shared else ()
    return Notice(
        kind=kind,
        name=gone.name,
        names=(gone.name,),
        cell=gone.cell,
        nbytes=nbytes_of(graph, left),
        holders=tuple(dict.fromkeys((*(_holder(path, roots[path.steps[0]]) for path in paths), *others))),
        advice=_joined(lines),
        frees=promised(analysis.facts, lines) if lines else None,
        shape=_shape(graph, first) if roots[first.steps[0]].is_shown else f"{NOT_SHOWN}: {gone.name}",
        bound=gone.bound,
        holder_cell=first.cell,
        is_whole=is_whole,
        keeps_graph=any(GRAPH in step for step in first.steps),
        storages=_keys(graph, left),
        roots=frozenset(graph.roots[n].label for storage in left for n in _roots_of(analysis, storage)),
    )


def _keys(graph: Graph, numbers: Iterable[int]) -> frozenset[StorageKey]:
    return frozenset((graph.storages[n].device, graph.storages[n].address) for n in numbers)


def _others(analysis: Analysis, left: set[int], paths: list[Path]) -> tuple[str, ...]:
    """Return the roots, besides those of the paths, that lead to what is left."""
    known = {path.steps[0] for path in paths}
    labels = (analysis.facts.graph.roots[n].label for storage in sorted(left) for n in sorted(_roots_of(analysis, storage)))
    return tuple(label for label in dict.fromkeys(labels) if label not in known)


def _holder(path: Path, root: Root) -> str:
    """Return a way as one would write it; of an error, a frame or a cache, its name alone: the way through it is long."""
    if not root.is_shown:
        return NOT_SHOWN
    return path.text if root.kind in ("name", "module", "out", "library") else root.label


def _shape(graph: Graph, path: Path) -> str:
    root = next(root for root in graph.roots if root.label == path.steps[0])
    which = f" (In[{root.cell}])" if root.kind == "error" and root.cell is not None else ""  # the next error is another cause
    return f"{root.kind}: {_KEY.sub('[·]', _holder(path, root))}{which}"


def _cuts(paths: list[Path], roots: Mapping[str, Root], is_complete: bool) -> list[Advice]:
    """Return a line for each way, once; none where one of them cannot be cut by a line."""
    lines = dict[str, Advice]()
    for path in paths:
        root = roots[path.steps[0]]
        is_one_of_many = (not is_complete or len(paths) > _WAYS) and root.kind == "name"
        line = release_names((root.label,)) if is_one_of_many else path.advice
        if root.kind == "frame" or not line.is_code:
            return []
        lines[line.command] = line
    return list(lines.values())


def _needed(facts: Facts, lines: list[Advice]) -> list[Advice]:
    """Return the lines without those that add nothing to the others; names are spared first. Of many, all."""
    if len(lines) > _FEW or not (nbytes := promised(facts, lines)):
        return lines
    for line in sorted(lines, key=lambda line: not line.targets):
        others = [other for other in lines if other is not line]
        if others and promised(facts, others) == nbytes:
            lines = others
    return lines


def _deletes_what_is_in_use(analysis: Analysis, lines: list[Advice]) -> bool:
    """Say whether one of the names that these lines delete leads to what other names use as well: it is in use itself."""
    graph = analysis.facts.graph
    names = {line.ends for line in lines} | {text for line in lines for text in line.targets}
    gone = [n for n, root in enumerate(graph.roots) if root.label in names]
    return not analysis.once(_used).isdisjoint(storages_of(graph, reach_of_roots(graph, gone)))


def _joined(lines: list[Advice]) -> tuple[Advice, ...]:
    """Return the lines in the order in which they work: Python, one cleanup with all targets, then what is stale."""
    targets = tuple(text for line in lines for text in line.targets)
    code = (line for line in lines if not line.targets and line != release_stale())
    stale = (line for line in lines if line == release_stale())
    return (*code, *((release_names(targets),) if targets else ()), *stale)
