"""Diagnosis of a cell's leftovers without a user's name: by its error, by a result, by a cache of a library."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nbguard.memory.cleanup.plan.default import default_plan
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.cleanup.plan.promises import promised
from nbguard.memory.core.advice import Advice, release_stale
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Root
from nbguard.memory.core.references.graph import STALE_KINDS, nbytes_of, shortest_path
from nbguard.memory.core.references.releases import release_of_way
from nbguard.memory.reports.notices.judge import HeldStorages, held_storages, storage_numbers, telling_path
from nbguard.memory.reports.notices.notice import Notice, NoticeKind, StorageKey

_STEPS = ("out", "leftovers", "cache")
"""Steps of a cleanup that let go of the leftovers of a cell that ended well."""


def judge_left(analysis: Analysis, cell: int, former: HeldStorages | None, least: int, *, raised: bool) -> Notice | None:
    """Return the notice on the cell's leftovers without a name, or None if they are less than `least` bytes.

    `former` are the bytes held at the last scan before it, or None without one: then only the cell's own error and result
    count. An out-of-memory error has a card of its own.
    """
    if raised:
        return None if analysis.facts.oom is not None else _of_error(analysis, cell, least)
    return _of_result(analysis, cell, former, least) or _of_library(analysis, cell, former, least)


def is_still_held(analysis: Analysis, notice: Notice, alive: Collection[StorageKey]) -> bool:
    """Say whether a notice that is about no name still holds: its holders have some of these storages, or they are stale."""
    if release_stale() in notice.advice:
        return not analysis.once(default_plan).storages.isdisjoint(storage_numbers(analysis.facts.graph, alive))
    held = analysis.once(held_storages)
    return any(held[key][1] & notice.roots for key in alive if key in held)


def _of_error(analysis: Analysis, cell: int, least: int) -> Notice | None:
    plan = analysis.once(default_plan)
    nbytes = sum(action.nbytes or 0 for action in plan.actions if action.kind in ("error", "leftovers"))
    if nbytes < least:
        return None
    return _stale(analysis, "error", cell, nbytes, "last error", "error")


def _of_result(analysis: Analysis, cell: int, former: HeldStorages | None, least: int) -> Notice | None:
    """Return the notice on an experiment that the cell has shown or left, and that no name leads to."""
    plan, graph = analysis.once(default_plan), analysis.facts.graph
    actions = [action for action in plan.actions if action.kind in _STEPS and (action.nbytes or 0) >= least]
    come = set[int]() if former is None else plan.storages & storage_numbers(graph, _came(analysis, former))
    has_come = nbytes_of(graph, come) >= least
    own = [action for action in actions if f"Out[{cell}]" in action.names or (action.kind == "leftovers" and has_come)]
    if not own:
        return None
    action = max(own, key=lambda one: one.nbytes or 0)
    return _stale(analysis, "left", cell, action.nbytes or 0, _holder(action), action.kind)


def _holder(action: Action) -> str:
    return action.names[0] if action.kind == "out" else action.subject


def _came(analysis: Analysis, former: HeldStorages) -> set[StorageKey]:
    """Return the storages that were not held before; one at the same address and of another size is another one."""
    held = analysis.once(held_storages)
    return {key for key, (nbytes, _) in held.items() if key not in former or former[key][0] != nbytes}


def _of_library(analysis: Analysis, cell: int, former: HeldStorages | None, least: int) -> Notice | None:
    """Return the notice on the cache or container of a library that alone kept the cell's objects, if a line empties it."""
    if former is None:
        return None
    libraries = {root.label: root for root in analysis.facts.graph.roots if root.kind == "library"}
    kept: dict[str, set[StorageKey]] = {}
    for key in _came(analysis, former):
        labels = analysis.once(held_storages)[key][1]
        if labels <= libraries.keys():
            kept.setdefault(min(labels), set()).add(key)
    for label, keys in kept.items():
        line = _line(analysis, libraries[label], keys)
        if line is not None and (line.frees or 0) >= least:
            text = telling_path(analysis, label, keys).text
            nbytes = sum(analysis.once(held_storages)[key][0] for key in keys)
            return Notice(
                kind="left",
                name=label,
                names=(label,),
                cell=cell,
                nbytes=nbytes,
                holders=(text,),
                advice=(line,),
                frees=line.frees,
                shape=f"In[{cell}]: {label}",
                storages=frozenset(keys),
                roots=frozenset({label}),
            )
    return None


def _line(analysis: Analysis, root: Root, keys: Collection[StorageKey]) -> Advice | None:
    graph = analysis.facts.graph
    numbers = storage_numbers(graph, keys)
    carriers = {n for n, node in enumerate(graph.nodes) if numbers.intersection(node.storages)}
    line = release_of_way(graph, root, shortest_path(graph, root, carriers))
    return replace(line, frees=promised(analysis.facts, (line,))) if line.is_code and line.cut else None


def _stale(analysis: Analysis, kind: NoticeKind, cell: int, nbytes: int, holder: str, step: str) -> Notice:
    frees = promised(analysis.facts, (release_stale(),))
    graph = analysis.facts.graph
    return Notice(
        kind=kind,
        name=holder,
        names=(holder,),
        cell=cell,
        nbytes=nbytes,
        holders=(holder,),
        advice=(release_stale(frees),),
        frees=frees,
        shape=f"In[{cell}]: {step} {holder}",
        storages=frozenset((graph.storages[n].device, graph.storages[n].address) for n in analysis.once(default_plan).storages),
        roots=frozenset(root.label for root in graph.roots if root.kind in STALE_KINDS),
    )
