"""Advice: a line to run that lets memory go, with what it does and what it gives back. Every such line is made here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from nbguard.memory.facts import EXPERIMENT_KINDS, Graph, Root
from nbguard.memory.references.function_caches import cached_edges, is_function_cache
from nbguard.memory.references.graph import (
    STALE_KINDS,
    Edge,
    nbytes_of,
    path_text,
    reach_of_roots,
    storages_of,
)

_FIXED = ("tuple", "frozenset", "mappingproxy", "partial", "method", "builtin_function_or_method", "generator")
_CONTEXTS = frozenset({"ContextVar", "Context", "Token"})
"""What keeps a value of a context: deleting a name of the variable lets nothing go."""
_EMPTIED = frozenset({"dict", "list", "set", "OrderedDict", "defaultdict", "deque"})
"""Containers of a library or a class that are emptied by `clear()`."""
CLEANUP = "%reset_gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line to run in a cell. Without a command there is none that lets the memory go, and `effect` may say why."""

    command: str  # runs as it stands; empty: there is none
    effect: str = ""  # in a few words
    cut: frozenset[Edge] = frozenset()  # references that it takes away, where these are known

    @property
    def is_code(self) -> bool:
        """Return whether the command runs as it stands: a magic, or a line of Python."""
        return self.command.startswith("%") or (bool(self.command) and _is_code(self.command))


NONE = Advice(command="")


def release_stale() -> Advice:
    """Return the advice that frees all that is stale."""
    return Advice(command=CLEANUP, effect="frees all that is stale")


def release_names(names: Sequence[str]) -> Advice:
    """Return the advice that deletes names, or what one writes after `del`, and frees their memory."""
    return Advice(command=f"{CLEANUP} {' '.join(names)}", effect=f"deletes {', '.join(names)} and frees their memory")


def promised(graph: Graph, advice: Advice) -> int | None:
    """Return the bytes that a line gives back by the references that it takes away; None where these are not known."""
    if not advice.cut:
        return None
    roots = range(len(graph.roots))
    held, left = (storages_of(graph, reach_of_roots(graph, roots, cut)) for cut in (frozenset[Edge](), advice.cut))
    return nbytes_of(graph, held - left)


def release_of_way(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that cuts a way from a root where least is lost: before the experiment, or the thing itself."""
    if root.kind == "out":
        return Advice(command=f"{CLEANUP} {root.label}", effect="forgets the displayed result and frees its memory")
    if root.kind in STALE_KINDS:
        return release_stale()
    if root.ended_by:
        return Advice(command=root.ended_by, effect="ends the library's hold on it")
    if root.kind == "frame":
        return Advice(command="wait until it ends")
    if root.kind not in ("name", "module") and not root.module:
        return NONE
    if any(graph.nodes[node].type_name in _CONTEXTS for node in way):
        return NONE
    if cleared := _cleared(graph, root, way):
        return cleared
    return _deleted(graph, root, way) if root.kind in ("name", "module") else NONE


def _cleared(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice | None:
    """Return the line that empties the cache of a function on the way, or the container of a library or a class."""
    for place, number in enumerate(way):
        text, node = path_text(graph, root, way[: place + 1]), graph.nodes[number]
        if not _is_code(text):
            return None
        if is_function_cache(graph, number):
            line = f"{_imported(root)}{text}.cache_clear()"
            return Advice(command=line, effect="empties the function's cache", cut=cached_edges(graph, number))
        cut = frozenset((number, child) for child in node.children)
        is_of_class = any(graph.nodes[n].type_name == "type" for n in way[:place])
        is_written = place == 0 or bool(dict(graph.nodes[way[place - 1]].references).get(number))
        is_private = root.kind == "library" and "._" in text  # a registry that its library needs
        if node.type_name in _EMPTIED and is_written and cut and (is_of_class or root.kind == "library") and not is_private:
            if place == 0 and root.is_class:  # the attributes of the class itself
                continue
            return Advice(command=f"{_imported(root)}{text}.clear()", effect=f"empties {text}", cut=cut)
    return None


def _deleted(graph: Graph, root: Root, way: tuple[int, ...]) -> Advice:
    """Return the line that deletes the thing on the way whose loss costs least."""
    entry = next((place for place, n in enumerate(way) if graph.nodes[n].kind in EXPERIMENT_KINDS), len(way) - 1)
    while entry and not _can_delete(graph, root, way[: entry + 1]):
        entry -= 1
    text = path_text(graph, root, way[: entry + 1])
    if root.kind == "name":
        return Advice(command=f"{CLEANUP} {text}", effect=f"deletes {text} and frees its memory")
    return Advice(command=f"{_imported(root)}{text} = None", effect="frees its memory")


def _imported(root: Root) -> str:
    """Return the import without which the label of a root is no expression in a notebook."""
    return f"import {root.module}; " if root.module else ""


def _can_delete(graph: Graph, root: Root, way: tuple[int, ...]) -> bool:
    """Say whether the last step of a way is one that `del` takes: not out of a tuple, nor through a closure."""
    if not _is_code(f"del {path_text(graph, root, way)}"):
        return False
    label = dict(graph.nodes[way[-2]].references).get(way[-1], "")
    return label not in ("", ".__self__") and graph.nodes[way[-2]].type_name not in _FIXED


def _is_code(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except SyntaxError:
        return False
