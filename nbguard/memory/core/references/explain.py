"""The reasons why something is still alive, as ways from roots or parts of PyTorch, and the line that would cut each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import or_
from types import MappingProxyType
from typing import ClassVar

from nbguard.memory.core.advice import HARD, NONE, RECORD_ON, Advice, empty_parts, is_python, release_errors, release_names
from nbguard.memory.core.facts import Facts, Graph, HolderSource, Root
from nbguard.memory.core.references.graph import (
    GRADIENT,
    STALE_KINDS,
    nbytes_of,
    path_text,
    reach,
    shortest_path,
    shortest_paths,
    steps_of,
    storages_of,
)
from nbguard.memory.core.references.holders import Holder
from nbguard.memory.core.references.owner_sets import CONTAINERS, bits_of, owners_of_nodes
from nbguard.memory.core.references.releases import can_delete, release_of_alike, release_of_way
from nbguard.memory.core.references.shown_paths import ways_written
from nbguard.render.result import Result

_PER_ROOT = 4
"""Most ways shown of one root: one exception can hold a Learner by dozens of variables."""
_CONTAINERS = frozenset({"dict", "list", "tuple", "set", "frozenset", "deque", "OrderedDict", "defaultdict"})
_OF_ERRORS = frozenset({"traceback", "frame", "locals"})
_CARRIERS = 8
"""Most of the largest tensors behind a root that are named where the root itself is explained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way from a root that keeps the thing alive."""

    steps: tuple[str, ...]  # as one would write them, the root first
    cell: int | None  # number of the cell that the root stems from
    stale: bool  # the root is none of the user's own
    advice: Advice  # the line that cuts the way where least is lost
    storages_only: bool  # the way leads to its memory, not to the object
    times: int = field(default=1, metadata={"json": False})  # how often a place on the way refers to the next, as to a hook

    @property
    def text(self) -> str:
        """Return the path as one expression: `runs['a'].learn`."""
        return "".join(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Why(Result):
    """The answer of `%gpumem why NAME`."""

    kind: ClassVar[str] = "why"
    view: ClassVar[str] = "nbguard.memory.core.device_view:why_blocks"

    name: str  # as the user wrote it
    what: str  # the object in a few words
    nbytes: int  # bytes that it reaches
    frees: int | None = None  # bytes that its release frees, by the plan; None if it is not released by a name
    together: Advice = NONE  # frees its memory with all else that has to go, where its release frees next to none
    paths: tuple[Path, ...]  # ways to it, at most a few of each root
    more: tuple[tuple[str, int], ...] = ()  # (root, number) of ways that are not among `paths`
    deleted: int | None = None  # number of the cell that has deleted the name, or None if it exists: then all is the rest
    released_by: str = ""  # command of the cleanup that deleted the name; else empty
    is_between_cells: bool = False  # the name went after that cell, by a cleanup from a panel
    release: tuple[Advice, ...] = ()  # lines that let go of it together, to run one after the other; empty without any
    released: int | None = None  # bytes that these lines give back; None if unknown


def explain(facts: Facts, name: str, node: int, what: str, per_root: int = _PER_ROOT) -> Why:
    """Return why the object at `node`, called `name`, and the memory behind it are alive."""
    graph = facts.graph
    storages = storages_of(graph, reach(graph, (node,)))
    carriers = {n for n, fact in enumerate(graph.nodes) if storages.intersection(fact.storages)}
    parents = {n for n, fact in enumerate(graph.nodes) if node in fact.children}
    paths, more = list[Path](), list[tuple[str, int]]()
    leading = owners_of_nodes(graph, [root.nodes for root in graph.roots])
    of_interest = reduce(or_, (leading[n] for n in carriers | {node}))
    for root in (graph.roots[number] for number in bits_of(of_interest)):
        ways_of_root = [_in_model(graph, root, way, path_to(graph, root, way)) for way in _ways(graph, root, node, parents)]
        ways_of_root = list({path.text: path for path in reversed(ways_of_root)}.values())[::-1]
        if not ways_of_root and (way := shortest_path(graph, root, carriers)):
            ways_of_root = [path_to(graph, root, way, storages_only=True)]
        paths += ways_of_root[:per_root]
        more += [(root.label, len(ways_of_root) - per_root)] if len(ways_of_root) > per_root else []
    if name:
        paths = [_of_its_parts(graph, path) for path in paths]
    by_length = sorted((path for path in paths if not path.advice.ends), key=lambda path: len(path.text), reverse=True)
    shortest = {path.advice.cut: path.advice for path in by_length}
    paths = [replace(path, advice=shortest.get(path.advice.cut, path.advice)) if path.advice.cut else path for path in paths]
    first = {path.steps[0]: len(path.text) for path in sorted(paths, key=lambda path: len(path.text), reverse=True)}
    paths.sort(key=lambda path: (path.storages_only, path.stale, first[path.steps[0]], path.steps[0], len(path.text)))
    return Why(name=name, what=what, nbytes=nbytes_of(graph, storages), paths=tuple(paths), more=tuple(more))


def _in_model(graph: Graph, root: Root, way: tuple[int, ...], path: Path) -> Path:
    """Return a way through a container that a model's code fills, or to a tensor with a graph, with the line that empties it.

    The model stays, and a report names the same line.
    """
    if root.kind not in ("name", "module") or path.advice.command == release_errors().command:
        return path
    for place, (owner, number) in enumerate(pairwise(way), start=1):
        node, text = graph.nodes[number], path_text(graph, root, way[: place + 1])
        label = dict(graph.nodes[owner].references).get(number, "")
        is_of_model = any(graph.nodes[n].kind == "model" for n in (owner, *way[place - 2 : place - 1]))
        is_no_rest = not is_of_model or graph.nodes[owner].module_part or node.module_part or label in ("", GRADIENT)
        if is_no_rest or label.startswith("._") or not is_python(text):
            continue
        is_container = node.type_name in CONTAINERS
        if is_container and number != way[-1] and can_delete(graph, root, way):
            return replace(path, advice=replace(release_names((path.text,)), cut=frozenset({(way[-2], way[-1])})))
        if is_container:
            cut = frozenset((number, child) for child in node.children)
        elif node.kind == "tensor" and any(graph.nodes[n].kind == "graph" for n in reach(graph, (number,))):
            cut = frozenset({(owner, number)})
        else:
            continue
        return replace(path, advice=empty_parts(root.module, [(text, is_container)], cut))
    return path


def _of_its_parts(graph: Graph, path: Path) -> Path:
    """Return a path whose end is a name of an object that has experiments as parts, with the line that lets go of these alone.

    A study keeps the findings of its trials when their models go.
    """
    root = next(root for root in graph.roots if root.label == path.steps[0])
    nodes = [graph.nodes[node] for node in root.nodes]
    if len(path.steps) > 1 or path.storages_only or root.kind != "name" or any(node.kind != "object" for node in nodes):
        return path
    alike = None if any(node.type_name in _CONTAINERS for node in nodes) else release_of_alike(graph, root)
    return path if alike is None else replace(path, advice=alike)


def explain_root(facts: Facts, label: str) -> Why | None:
    """Return the ways from the root called `label` to the largest pieces of memory behind it; None if there is no such root."""
    graph = facts.graph
    root = next((root for root in graph.roots if root.label == label), None)
    if root is None:
        return None
    reached = reach(graph, root.nodes)
    storages = storages_of(graph, reached)
    carriers = sorted((n for n in reached if graph.nodes[n].storages), key=lambda n: -nbytes_of(graph, graph.nodes[n].storages))
    ways = (shortest_path(graph, root, {node}) for node in carriers[:_CARRIERS])
    paths = list({path.text: path for path in (path_to(graph, root, way) for way in ways if way)}.values())
    left = len(carriers) - _CARRIERS
    more = ((root.label, left),) if left > 0 else ()
    return Why(name=label, what=root.what, nbytes=nbytes_of(graph, storages), paths=tuple(paths), more=more)


def explain_path(facts: Facts, text: str) -> Why | None:
    """Return why the thing at a path that a report shows is alive, or, for a root's label, the things behind it."""
    ways = ways_written(facts.graph, text)
    if not ways:
        return None
    if len(ways[0][1]) == 1:
        return explain_root(facts, text)
    node = ways[0][1][-1]
    return explain(facts, text, node, facts.graph.nodes[node].type_name)


def _ways(graph: Graph, root: Root, node: int, parents: Collection[int]) -> list[tuple[int, ...]]:
    """Return the shortest way to `node` by each object that refers to it, none of them through `node` itself."""
    ways = [(node,)] if node in root.nodes else []
    return ways + sorted(((*way, node) for way in shortest_paths(graph, root, parents, {node}).values()), key=len)


def path_to(graph: Graph, root: Root, way: tuple[int, ...], storages_only: bool = False) -> Path:
    """Return a way, the nodes from `root` on, as a path with the line that cuts it."""
    return Path(
        steps=tuple(steps_of(graph, root, way)),
        cell=root.cell,
        stale=root.kind in STALE_KINDS,
        advice=release_errors() if _is_of_error(graph, root, way) else release_of_way(graph, root, way),
        storages_only=storages_only,
        times=max((graph.nodes[at].repeated.count(child) + 1 for at, child in pairwise(way)), default=1),
    )


def _is_of_error(graph: Graph, root: Root, way: tuple[int, ...]) -> bool:
    """Say whether a way leads to an exception that the user keeps and whose frames alone hold memory, or through it."""
    error = next((n for n in way if graph.nodes[n].is_error), None)
    if error is None or root.kind not in ("name", "module"):
        return False
    own = [node for each in graph.roots if each.kind not in STALE_KINDS for node in each.nodes]
    others = (n for n, node in enumerate(graph.nodes) if node.kind not in _OF_ERRORS)
    frames = reach(graph, (error,), blocked=frozenset(others))
    return bool(storages_of(graph, reach(graph, own)) - storages_of(graph, reach(graph, own, blocked=frames)))


# --- The part of PyTorch or a library that keeps memory no Python object holds, and the line that helps.


_KEEPERS: Mapping[HolderSource, tuple[str, str, Advice]] = MappingProxyType(
    {
        "workspaces": (
            "PyTorch → cuBLAS",
            "scratch memory of matrix products, one block for each thread that has made one; the next product makes it again",
            HARD,
        ),
        "graphs": (
            "PyTorch → private pool",
            "it is freed with the CUDA graph captured into it, or with the MemPool",
            NONE,
        ),
        "site": ("C++ → a library", "made at that line of yours and kept by the library that the line calls", NONE),
        "unknown": (
            "C++ → a library",
            "buffers and caches of libraries; once the history is on, their new allocations are listed by line",
            RECORD_ON,
        ),
        "changed": ("another thread", "it allocated or freed memory during the scan; scan again", NONE),
    }
)
"""By the source of a holder: the keeper, how much it keeps, and the line to run."""


def is_explained(row: Holder) -> bool:
    """Return whether `explain_unheld` knows who keeps the memory of a row without a root."""
    return row.source in _KEEPERS


def explain_unheld(row: Holder) -> Why:
    """Return why the blocks of a row without a root are allocated. Only for a row that `is_explained`."""
    keeper, effect, advice = _KEEPERS[row.source]
    release = replace(advice, effect=effect, frees=None, targets=())
    if row.release != NONE:  # of the pool's own graph or MemPool
        release = replace(row.release, effect=row.release.effect if not row.release.targets else effect)
    path = Path(
        steps=(keeper,),
        cell=None,
        stale=False,
        advice=release,
        storages_only=True,
    )
    return Why(name=row.label, what=row.what, nbytes=row.retained, paths=(path,))
