"""Releases: the line that cuts a way from a root where least is lost, and the references that it takes away."""

from __future__ import annotations

import sys
from dataclasses import replace

from nbguard.memory import advice
from nbguard.memory.advice import Advice, is_python
from nbguard.memory.facts import EXPERIMENT_KINDS, Graph, Root
from nbguard.memory.references.function_caches import cached_edges, is_function_cache
from nbguard.memory.references.graph import (
    STALE_KINDS,
    Edge,
    path_text,
    reach,
)

_FIXED = ("tuple", "frozenset", "mappingproxy", "partial", "method", "builtin_function_or_method", "generator")
_CONTEXTS = frozenset({"ContextVar", "Context", "Token"})
"""What keeps a value of a context: deleting a name of the variable lets nothing go."""
_EXECUTOR = "ThreadPoolExecutor"
"""Keeps work that waits in a queue of its own, which its threads have as well: deleting the executor lets nothing go."""
_EMPTIED = frozenset({"dict", "list", "set", "OrderedDict", "defaultdict", "deque"})
"""Containers of a library or a class that are emptied by `clear()`."""
_NEVER_EMPTIED = frozenset(sys.stdlib_module_names) | {"IPython", "ipykernel", "matplotlib", "numpy", "torch", "traitlets"}
"""Libraries whose registries others live by: the loggers, the modules, the magics."""


def release_of_way(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that cuts a way from a root where least is lost: before the experiment, or the thing itself."""
    if root.kind == "out":
        return advice.release_output(root.label)
    if root.kind in STALE_KINDS:
        return advice.release_stale()
    if root.ended_by:
        return replace(advice.end_registration(root.ended_by), ends=root.label)
    if root.kind == "frame":
        return advice.WAIT
    if any(graph.nodes[node].type_name in _CONTEXTS for node in way):
        return advice.NONE
    if root.kind not in ("name", "module") and not root.module:
        return _emptied_cache(graph, way)
    if cleared := _cleared(graph, root, way):
        return cleared
    return _deleted(graph, root, way) if root.kind in ("name", "module") else _emptied_cache(graph, way)


def _cleared(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the line that empties the cache of a function on the way, or the container of a library or a class."""
    for place, number in enumerate(way):
        text, node = path_text(graph, root, way[: place + 1]), graph.nodes[number]
        if not is_python(text):
            return None
        if is_function_cache(graph, number):
            return replace(advice.empty_cache_of(root.module, text), cut=cached_edges(graph, number))
        cut = frozenset((number, child) for child in node.children)
        if node.type_name == _EXECUTOR and root.kind in ("name", "module") and not root.module:
            queue = frozenset(
                (at, child)
                for at in reach(graph, (number,))
                if graph.nodes[at].type_name == "SimpleQueue"
                for child in graph.nodes[at].children
            )
            return replace(advice.cancel_work(text), cut=queue) if queue else None
        is_of_class = any(graph.nodes[n].type_name == "type" for n in way[:place])
        is_written = place == 0 or bool(dict(graph.nodes[way[place - 1]].references).get(number))
        is_needed = root.module.partition(".")[0] in _NEVER_EMPTIED and (place > 0 or root.is_class)
        is_private = root.kind == "library" and ("._" in text or is_needed)
        if node.type_name in _EMPTIED and is_written and cut and (is_of_class or root.kind == "library") and not is_private:
            if place == 0 and root.is_class:  # the attributes of the class itself
                continue
            return replace(advice.empty_container(root.module, text), cut=cut)
    return None


def _emptied_cache(graph: Graph, way: tuple[int, ...]) -> Advice:
    """Return the advice that empties the cache of a function on a way that one cannot write; none where there is no cache."""
    caches = [number for number in way if is_function_cache(graph, number)]
    return replace(advice.empty_caches(), cut=cached_edges(graph, caches[0])) if caches else advice.NONE


def _deleted(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that deletes the thing on the way whose loss costs least."""
    entry = next((place for place, n in enumerate(way) if graph.nodes[n].kind in EXPERIMENT_KINDS), len(way) - 1)
    while entry and not can_delete(graph, root, way[: entry + 1]):
        entry -= 1
    text = path_text(graph, root, way[: entry + 1])
    cut = frozenset({(way[entry - 1], way[entry])}) if entry else frozenset[Edge]()
    line = advice.release_names((text,)) if root.kind == "name" else advice.set_none(root.module, text)
    return replace(line, cut=cut, ends="" if entry else root.label)


def can_delete(graph: Graph, root: Root, way: tuple[int, ...]) -> bool:
    """Say whether the last step of a way is one that `del` takes: not out of a tuple, nor through a closure.

    Nor one of a list that has the thing twice: it would still have it then.
    """
    if way[-1] in graph.nodes[way[-2]].repeated or not is_python(f"del {path_text(graph, root, way)}"):
        return False
    label = dict(graph.nodes[way[-2]].references).get(way[-1], "")
    return label not in ("", ".__self__") and graph.nodes[way[-2]].type_name not in _FIXED
