"""Why something is still alive: for each root that leads to it, the shortest path and the line that would cut it."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.core.facts import Facts, Graph, Root
from nbguard.core.ownership import STALE_KINDS, nbytes_of, path_text, reach, shortest_path, storages_of


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which a root keeps the thing alive. `storages_only`: the root leads to its memory, not to the object."""

    text: str
    cell: int | None
    stale: bool
    release: str
    storages_only: bool


@dataclass(frozen=True, slots=True)
class Why:
    """The answer of `%gpumem why NAME`. `nbytes` is what the thing reaches, `retained` what only it holds."""

    name: str
    what: str
    nbytes: int
    paths: tuple[Path, ...]


def explain(facts: Facts, name: str, node: int, what: str) -> Why:
    """Return why the object at `node`, called `name`, and the memory behind it are alive."""
    graph = facts.graph
    below = reach(graph, (node,))
    storages = storages_of(graph, below)
    carriers = {n for n, fact in enumerate(graph.nodes) if storages.intersection(fact.storages)}
    paths = []
    for root in graph.roots:
        way = shortest_path(graph, root, {node})
        if way:
            paths.append(_path(graph, root, way, storages_only=False))
        elif carriers and (way := shortest_path(graph, root, carriers)):
            paths.append(_path(graph, root, way, storages_only=True))
    paths.sort(key=lambda path: (path.storages_only, path.stale, len(path.text)))
    return Why(name, what, nbytes_of(graph, storages), tuple(paths))


def _path(graph: Graph, root: Root, way: tuple[int, ...], storages_only: bool) -> Path:
    text = path_text(graph, root, way)
    return Path(text, root.cell, root.kind in STALE_KINDS, _release(graph, root, way, text), storages_only)


def _release(graph: Graph, root: Root, way: tuple[int, ...], text: str) -> str:
    """Return the line that cuts this path, as far up as nothing else is lost: an element of a list rather than the list."""
    if root.kind in ("error", "garbage"):
        return "%reset_gpu"
    if root.kind == "name":
        part = path_text(graph, root, way[:2])
        return f"%reset_gpu {part if part.startswith(f'{root.label}[') and '<' not in part else root.label}"
    if root.kind == "out":
        return f"%reset_gpu {root.label}"
    if root.kind == "module":
        return f"{text} = None"
    return "wait until it ends" if root.kind == "frame" else ""
