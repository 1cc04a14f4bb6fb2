"""The judgement by one scan on the memory that a test left. A living fixture may hold it, other holders are leaks.

Most suites leave nothing, so this is imported for the first test that did.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nbguard.frontend.gpu_leaks.results import HeldMemory
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, Root, RootKind
from nbguard.memory.core.references.graph import GRAPH
from nbguard.memory.reports.notices.causes import held_storages, telling_path
from nbguard.memory.reports.notices.notice import StorageKey
from nbguard.memory.scan.heap.kinds import module_namespaces

_ORDER: tuple[RootKind, ...] = ("name", "module", "library", "cache", "frame", "error", "out", "garbage")
"""Kinds of roots in the order of how much they tell about a leak, such as a global before the thread that uses it."""


@dataclass(frozen=True, slots=True)
class LeakVerdict:
    """The leaks among storages that are left, and those that a living fixture holds, by the fixture's label."""

    leaks: tuple[HeldMemory, ...]
    excused: Mapping[str, frozenset[StorageKey]]


def judge(
    analysis: Analysis,
    left: Mapping[StorageKey, int],
    living: Collection[str],
    files: Mapping[str, str],
    lines: Mapping[StorageKey, str],
    fixture: str = "",
) -> LeakVerdict:
    """Return the verdict on storages that a test left, or a fixture after its end.

    Args:
        analysis: of a scan whose namespace has the values of the living fixtures by their labels.
        left: bytes of each storage.
        living: labels of fixtures that have not ended.
        files: paths of the tests' modules and of others of the user's, by name.
        lines: that allocated storages, as far as they are known.
        fixture: the one that made them; empty for the test.
    """
    held = analysis.once(held_storages)
    roots = {root.label: root for root in analysis.facts.graph.roots}
    excused: dict[str, set[StorageKey]] = {}
    groups: dict[str, set[StorageKey]] = {}
    for key in left:
        labels = held[key][1] if key in held else frozenset()
        if keepers := sorted(labels & set(living)):
            excused.setdefault(keepers[0], set()).add(key)
        elif labels:
            groups.setdefault(min(labels, key=lambda label: _rank(roots[label])), set()).add(key)
    leaks = [_leak(analysis, roots[label], keys, left, files, lines, fixture) for label, keys in groups.items()]
    leaks.sort(key=lambda leak: (-leak.nbytes, leak.holder))
    return LeakVerdict(tuple(leaks), {label: frozenset(keys) for label, keys in excused.items()})


def _rank(root: Root) -> tuple[int, int, str]:
    return _ORDER.index(root.kind), len(root.label), root.label


def _leak(
    analysis: Analysis,
    root: Root,
    keys: Collection[StorageKey],
    left: Mapping[StorageKey, int],
    files: Mapping[str, str],
    lines: Mapping[StorageKey, str],
    fixture: str,
) -> HeldMemory:
    text = telling_path(analysis, root.label, keys).text
    largest = sorted(keys, key=lambda key: -left[key])
    return HeldMemory(
        holder=_written(root, text, files),
        nbytes=sum(map(left.__getitem__, keys)),
        storages=len(keys),
        line=next((lines[key] for key in largest if lines.get(key)), ""),
        fixture=fixture,
        what="" if root.kind in ("name", "module") else root.what,
    )


def _written(root: Root, text: str, files: Mapping[str, str]) -> str:
    """Return a way as `CACHE[3]` behind the file of its module. It ends where a graph begins."""
    way, graph, _ = text.partition(GRAPH)
    way += graph
    if root.module in files and way.startswith(f"{root.module}."):
        return f"{files[root.module]}: {way[len(root.module) + 1 :]}"
    return way


def allocation_sites(facts: Facts) -> dict[StorageKey, str]:
    """Return the lines that allocated blocks, where the user has the allocator's history recorded."""
    return {
        (device.device, block.address): block.site
        for device in facts.devices
        for segment in device.segments or ()
        for block in segment.blocks
        if block.site
    }


def user_files(root: Path) -> dict[str, str]:
    """Return the files of the modules below the root folder of the tests, by the modules' names."""
    files, folder = {}, str(root).rstrip(os.sep) + os.sep
    for name, namespace in module_namespaces().items():
        file = namespace.get("__file__")
        if type(file) is str and file.startswith(folder):
            files[name] = Path(file).relative_to(root).as_posix()
    return files
