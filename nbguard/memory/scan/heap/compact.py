"""From a walk to plain data, that is, the objects that lead to a storage or are an experiment, and the words for each step."""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from nbguard.memory.core.facts import EXPERIMENT_KINDS, KEPT_KINDS, Graph, ModulePart, Node, Root, StorageFact
from nbguard.memory.core.references.graph import SOMEWHERE
from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import TypeTable, name_of
from nbguard.memory.scan.heap.labels import Labels
from nbguard.memory.scan.heap.walk import Walk
from nbguard.memory.scan.objects.own_ends import own_end
from nbguard.memory.scan.roots.frames import attached_locals
from nbguard.memory.scan.roots.root import LiveRoot

_NODE_KIND = {"array": "data", "part of an array": "data", "class": "code", "storage": "tensor", "context": "object"}
_PARTS: dict[str, ModulePart] = {"_parameters": "parameters", "_buffers": "buffers", "_modules": "modules"}
_WITH_METHODS = frozenset({"object", "model"})
_ALWAYS_LABELLED = frozenset({"learner", "frame", "locals", "traceback"})  # a cleanup goes by these labels
_LABEL_ALL = 30_000
"""Up to so many objects each step gets its label; beyond, only those on a shortest path from a root: writing the label of an
attribute makes Python build the attribute dict of its owner, which must not happen to a whole data structure."""


def compact(walk: Walk, roots: list[tuple[LiveRoot, list[int]]], nbytes: Callable[[StorageFact], int]) -> Graph:
    """Return the walk as a graph. `nbytes` says what the allocator set aside for a storage."""
    relevant = sorted(walk.leading_to(n for n in range(len(walk.objects)) if _is_goal(walk, n)))
    new = {old: number for number, old in enumerate(relevant)}
    for old in relevant:
        if walk.kind[old] == "frame" and (view := walk.number.get(attached_locals(walk.objects[old]) or 0)) is not None:
            walk.kind[view] = "locals"
    labelled = None if len(relevant) <= _LABEL_ALL else _on_shortest_paths(walk, new, roots)
    labels = Labels(walk.referents.autograd, walk.class_spaces)
    objects, kinds, holds = walk.objects, walk.kind, walk.holds
    children_of = {old: [child for child in _once(walk.children[old]) if child in new] for old in relevant}
    texts_of: dict[int, list[str]] = {}
    for old in _in_turn(objects, relevant):
        if children_of[old] and (labelled is None or old in labelled or kinds[old] in _ALWAYS_LABELLED):
            children = [objects[child] for child in children_of[old]]
            try:
                texts_of[old] = labels.of(objects[old], kinds[old], children)
            except Exception:  # noqa: BLE001 - as in `Unread.read`, without a call for each object
                walk.unread.note(objects[old])
    nodes, names, ends = [], TypeTable(name_of), TypeTable(own_end)
    parts = _parts_of_modules(walk, relevant if labelled is None else labelled)
    for old in relevant:
        obj, kind, children = objects[old], kinds[old], children_of[old]
        texts, type_name = texts_of.get(old), names.of(type(obj))
        nodes.append(
            Node(
                kind=_node_kind(type_name, kind),
                type_name=type_name,
                ref=id(obj),
                children=tuple([new[child] for child in children]),
                labels=tuple(texts) if texts is not None else (SOMEWHERE,) * len(children),
                storages=tuple(holds[old]) if old in holds else (),
                repeated=_repeated(walk.children[old], new),
                module_part=parts.get(id(obj), ""),
                own_end=ends.of(type(obj)) if kind in _WITH_METHODS else "",
            )
        )
        if kind in EXPERIMENT_KINDS:
            walk.tracker.note(obj)
    kept_roots = []
    for root, entries in roots:
        known = tuple(dict.fromkeys(new[entry] for entry in entries if entry in new))
        if known:
            kept_roots.append(
                Root(
                    kind=root.kind,
                    label=root.label,
                    nodes=known,
                    cell=root.cell,
                    what=root.what,
                    ended_by=root.ended_by,
                    module=root.module,
                    is_class=root.is_class,
                    thread=root.thread,
                    registry=root.registry,
                    cache=root.cache,
                    is_shown=root.is_shown,
                    is_ending=root.is_ending,
                )
            )
    storages = tuple(
        fact if (taken := nbytes(fact)) == fact.nbytes else replace(fact, nbytes=taken)  # a copy takes longer than the rest
        for fact in walk.storages
    )
    return Graph(tuple(kept_roots), tuple(nodes), storages, None if walk.rest is None else new[walk.rest])


def _parts_of_modules(walk: Walk, numbers: Iterable[int]) -> dict[int, ModulePart]:
    """Return the dicts of torch modules that have their parameters, buffers and modules, by their ids."""
    parts: dict[int, ModulePart] = {}
    for number in numbers:
        if walk.kind[number] == "model":
            attributes = attributes_of(walk.objects[number]) or {}
            parts |= {id(attributes[name]): part for name, part in _PARTS.items() if name in attributes}
    return parts


def _in_turn(objects: Sequence[Any], numbers: Sequence[int]) -> Iterable[int]:
    """Return objects as their references are written: a function says how the tuple of its cells is, an owner how its dict."""
    functions, others, dicts = list[int](), list[int](), list[int]()
    for number in numbers:
        kind = type(objects[number])
        (dicts if kind is dict else functions if kind is types.FunctionType else others).append(number)
    return chain(functions, others, dicts)


def _once(children: list[int]) -> Iterable[int]:
    return children if len(children) < 2 else dict.fromkeys(children)


def _repeated(children: list[int], new: dict[int, int]) -> tuple[int, ...]:
    """Return the children that are referred to more than once, for each reference but the first."""
    if len(children) < 2 or len(set(children)) == len(children):
        return ()
    return tuple(new[child] for child, count in Counter(children).items() if child in new for _ in range(count - 1))


def _is_goal(walk: Walk, number: int) -> bool:
    """Say whether an object is a goal of a graph: a holder of a storage, an experiment, a keeper of a pool, or the rest."""
    return number in walk.holds or number == walk.rest or walk.kind[number] in KEPT_KINDS


def _on_shortest_paths(walk: Walk, new: dict[int, int], roots: Iterable[tuple[LiveRoot, list[int]]]) -> set[int]:
    """Return the objects on the shortest path from a root to each holder of a storage and each experiment."""
    above: dict[int, int | None] = {entry: None for _, entries in roots for entry in entries if entry in new}
    todo = deque(above)
    while todo:
        parent = todo.popleft()
        for child in walk.children[parent]:
            if child in new and child not in above:
                above[child] = parent
                todo.append(child)
    on_a_path: set[int] = set()
    for goal in above:
        at: int | None = goal if _is_goal(walk, goal) else None
        while at is not None and at not in on_a_path:
            on_a_path.add(at)
            at = above[at]
    return on_a_path


def _node_kind(type_name: str, kind: str) -> Any:
    return "data" if type_name in ("DataFrame", "Series") else _NODE_KIND.get(kind, kind)
