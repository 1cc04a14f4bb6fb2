"""One scan of the process, with devices, objects, roots and the facts of the last error, joined into `Facts`."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, compress
from threading import get_ident
from typing import Any

from nbguard.errors import NoTorchError
from nbguard.libraries import libraries
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import EXPERIMENT_KINDS, DeviceFacts, Facts, Graph, StorageFact, Unavailable, UnwalkedFact
from nbguard.memory.core.references.graph import STALE_KINDS, reach_of_roots, without_arguments
from nbguard.memory.core.references.owner_sets import with_cycles_named
from nbguard.memory.core.simulated import DEVICE as SIMULATED
from nbguard.memory.scan.devices.cuda import allocations, device_facts, is_autocast_on, tracked_device
from nbguard.memory.scan.devices.kept_memory import pinned_facts, pool_facts
from nbguard.memory.scan.heap.compact import compact
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.unwalked import exported_storages
from nbguard.memory.scan.heap.walk import MORE_TENSORS, Walk, WeakTracker, never_walked
from nbguard.memory.scan.learners import describe, gradient_calls, learner_facts
from nbguard.memory.scan.libraries import known_leaks_of
from nbguard.memory.scan.oom.failed_runs import unbound_names, unsaid_names
from nbguard.memory.scan.oom.last_error import oom_fact
from nbguard.memory.scan.outside.referrers import other_holders
from nbguard.memory.scan.outside.unreached import orphan_roots
from nbguard.memory.scan.parked import has_compiled, parked_addresses, parked_facts, shared_storages, unseen_by_modes
from nbguard.memory.scan.pause import keep_garbage, pause_main_thread
from nbguard.memory.scan.roots import tracebacks as marimo
from nbguard.memory.scan.roots.frames import LiveRoot, running_roots
from nbguard.memory.scan.roots.registries import (
    Cells,
    ending_handles,
    ending_roots,
    loop_of,
    module_roots,
    output_owners,
    output_places,
    output_roots,
    registry_roots,
    user_roots,
    waiting_roots,
)
from nbguard.memory.scan.roots.tracebacks import error_roots, final_roots, parts_of_errors
from nbguard.memory.scan.workers import workers_facts
from nbguard.texts import running_shell

_COUNTED = ("name", "module", "out")
"""Kinds of roots whose references are all in namespaces that can be counted."""

_WORTH_A_CLIMB = 0.01
"""Share of the bytes found that must be unexplained before holders in libraries are searched for (promise: 99 % named)."""


@dataclass(frozen=True, kw_only=True)
class Notebook:
    """The place where names live: an IPython shell, or, in a script, just a namespace.

    `is_running`: the user's code runs in another thread during the scan. It may use objects that no root leads to for a moment:
    these count as held, and are not followed up, which would go on for as long as the code runs.

    `failed`: the error that ends the process, or its thread. The variables of its functions are names then, and no leftovers.

    `in_use`: names that are needed anyway, so that it does not matter who else holds their objects.
    """

    shell: Any
    namespace: dict[str, Any]
    is_running: bool = False
    failed: BaseException | None = None
    in_use: Set[str] = frozenset()

    @classmethod
    def current(cls, namespace: dict[str, Any] | None = None) -> Notebook:
        """Return the running IPython session, or the script's `__main__` (or `namespace`)."""
        shell = running_shell() if namespace is None else None
        if namespace is None:
            namespace = sys.modules["__main__"].__dict__ if shell is None else shell.user_ns
        return cls(shell=shell, namespace=namespace)

    @property
    def out(self) -> dict[int, Any]:
        """Return IPython's output history, `Out`."""
        history: dict[int, Any] = self.namespace.get("_oh", {}) if self.shell is not None else {}
        return history

    @property
    def hidden(self) -> dict[str, Any]:
        """Return the names that IPython itself put into the namespace."""
        names: dict[str, Any] = self.shell.user_ns_hidden if self.shell is not None else {}
        return names

    @property
    def inputs(self) -> list[str]:
        """Return the sources of the session's cells, by number."""
        sources: list[str] = self.namespace.get("In", []) if self.shell is not None else []
        return sources

    def shell_attributes(self) -> dict[int, str]:
        """Return the ids of the dicts that hold the shell's attributes, each with how one writes the shell."""
        spaces = [] if self.shell is None else [self.shell.__dict__, self.shell.__dict__.get("_trait_values")]
        return {id(space): "get_ipython()" for space in spaces if space is not None}

    def internals(self) -> set[int]:
        """Return the ids of IPython's or marimo's machinery: the walk stops there, else it would find everything."""
        shell = self.shell
        machinery = [self.namespace, self]
        if self.failed is not None:
            parts = parts_of_errors([self.failed])
            machinery += [*parts.errors.values(), *parts.frames.values()]
        if shell is None:
            machinery += marimo.machinery()
        if shell is not None:
            names = (
                "user_ns_hidden",
                "displayhook",
                "history_manager",
                "kernel",
                "InteractiveTB",
                "SyntaxTB",
                "events",
                "compile",
                "__dict__",
            )
            machinery += [shell, self.out, self.inputs, *(getattr(shell, name, None) for name in names)]
            machinery.append(shell.displayhook.__dict__)
            machinery += [sys.stdout, sys.stderr]  # each thread has the latter, and by way of it the kernel
        machinery.append(loop_of(shell))  # each task and timer leads there, and from there to all others
        return {id(value) for value in machinery if value is not None}


@dataclass(frozen=True)
class Scan:
    """Facts, and weak references that tell later which of the objects are gone."""

    facts: Facts
    tracker: WeakTracker

    @cached_property
    def analysis(self) -> Analysis:
        """Return the analysis of the facts: one for everybody who has this scan."""
        return Analysis(self.facts)


@dataclass(frozen=True, kw_only=True)
class TimedScan(Scan):
    """A scan that says how old it is. Like any scan it refers to objects of the user's weakly or by id only."""

    since: float  # seconds since the epoch, when it began
    seconds: float  # that it took
    is_beside: bool  # made while code of the user's ran in another thread


def scan(notebook: Notebook, *, tensors: bool = False, tracked: str = "") -> Scan:
    """Scan the process once. Raises NoTorchError if PyTorch is not imported; changes nothing.

    With `tensors`, the tracker knows each tensor too, weakly, so that a parking finds them again. `tracked` is the kind of
    device whose tensors are looked for; if empty, the one that nbguard reports on here, a GPU where there is one.
    """
    if "torch" not in sys.modules:
        raise NoTorchError
    libraries()  # imports its files: nothing may be imported while the main thread stands, perhaps with a lock of an import
    with pause_main_thread():
        made = _scan_without_collecting(notebook, tensors, tracked)
        if made.tracker.tensors is None:
            return made
        return replace(made, facts=replace(made.facts, fixed=shared_storages(made.tracker)))


def timed_scan(notebook: Notebook) -> TimedScan:
    """Scan the process once, as `scan` does, and note when that was. Raises NoTorchError if PyTorch is not imported."""
    since, start = time.time(), time.perf_counter()
    made = scan(notebook)
    return TimedScan(
        facts=made.facts,
        tracker=made.tracker,
        since=since,
        seconds=time.perf_counter() - start,
        is_beside=notebook.is_running,
    )


def _scan_without_collecting(notebook: Notebook, tensors: bool, tracked: str) -> Scan:
    torch: Any = sys.modules["torch"]
    with (
        keep_garbage(),
        torch._C.DisableTorchFunction(),
    ):  # to read a tensor's attributes must run no code of a subclass or mode
        return _scan_once(notebook, tensors, tracked or tracked_device())


def _scan_once(notebook: Notebook, tensors: bool, tracked: str) -> Scan:
    before = allocations(tracked)
    devices, missing = device_facts(tracked)
    kinds = Kinds()
    ending = ending_handles()
    walk = Walk(tracked, notebook.internals() | never_walked(kinds) | set(map(id, ending)), kinds)
    oom = oom_fact(notebook.shell, notebook.inputs, notebook.failed)
    ran_out = oom is not None and oom.kind == "device"  # then the card asks what may move, where tensors are on that device
    ran_out = ran_out and (tracked == "cuda" or (oom is not None and oom.device == SIMULATED))
    walk.tracker.tensors = {} if tensors or ran_out else None
    walk.parked = parked_addresses() if tracked == "cpu" else ()
    places = [*_roots(notebook, walk, kinds), *ending_roots(ending)]
    with unseen_by_modes():
        facts = _facts_from(places, walk, notebook, devices, missing, before)
        return Scan(replace(facts, oom=oom), walk.tracker)


def _facts_from(
    places: list[LiveRoot],
    walk: Walk,
    notebook: Notebook,
    devices: tuple[DeviceFacts, ...],
    missing: tuple[Unavailable, ...],
    before: Any,
) -> Facts:
    """Walk from the roots and join the findings, but for the last error.

    `before` is the answer of `allocations` when the scan began.
    """
    tracked = walk.tracked
    roots = _walk_from(places, walk)
    _count_entries(roots, walk, notebook)
    walk.shell = notebook.shell_attributes()
    changed = allocations(tracked) != before  # another thread trains: its present objects are nearer to those of the walk
    if changed:
        devices, missing = device_facts(tracked)
    threshold = int(_WORTH_A_CLIMB * sum(storage.nbytes for storage in walk.storages))
    roots += orphan_roots(walk, None if notebook.is_running else threshold)
    roots += [] if notebook.is_running else other_holders(walk, roots, notebook.in_use)
    if walk.tracker.tensors is not None:
        walk.tracker.exported = exported_storages(walk)
    graph = compact(walk, roots, _block_sizes(devices))
    graph = graph if notebook.failed is None else without_arguments(graph)
    graph = with_cycles_named(graph, _of_users_classes(walk, graph))
    numbers = {node.ref: number for number, node in enumerate(graph.nodes)}
    learners = _of_kind("learner", walk, numbers)
    return Facts(
        tracked=tracked,
        devices=devices,
        graph=graph,
        learners=learner_facts(learners),
        gradient_calls=gradient_calls(learners),
        unavailable=missing,
        pid=os.getpid(),
        frozen_objects=gc.get_freeze_count(),
        is_autocast_on=is_autocast_on(tracked),
        pools=pool_facts(_of_kind("pool", walk, numbers), graph),
        pinned=pinned_facts() if tracked == "cuda" else None,
        parked=parked_facts(),
        changed=changed,
        has_compiled=has_compiled(),
        known_leaks=known_leaks_of(root.label for root in graph.roots),
        workers=workers_facts(walk, _of_kind("iterator", walk, numbers), numbers, _made_here(roots, notebook)),
        unwalked=_unwalked(walk),
        unread=walk.unread.facts,
    )


def _unwalked(walk: Walk) -> UnwalkedFact | None:
    if walk.rest is None or walk.graphs is None:
        return None
    return UnwalkedFact(
        graphs_cut=walk.graphs.cut,
        operations=walk.graphs.nodes,
        operations_at_most=walk.graphs.at_most,
        tensors=walk.tensors,
        tensors_left=len(walk.skipped),
    )


def _of_users_classes(walk: Walk, graph: Graph) -> set[int]:
    """Return the nodes of waiting cycles that are instances of the user's own classes."""
    waiting = reach_of_roots(graph, (n for n, root in enumerate(graph.roots) if root.kind == "garbage"))
    types = ((n, type(walk.objects[walk.number[graph.nodes[n].ref]])) for n in waiting)
    return {n for n, cls in types if walk.referents.is_users_class(cls)}


def _made_here(roots: list[tuple[LiveRoot, list[int]]], notebook: Notebook) -> set[int]:
    """Return the ids of the scan's own referrers to the roots' objects, and of the places where IPython keeps a result."""
    return {id(root.objects) for root, _ in roots} | _result_places(notebook)


def _result_places(notebook: Notebook) -> set[int]:
    """Return the ids of all that refers to a displayed result for IPython: dicts, and the objects whose attributes they are."""
    if notebook.shell is None:
        return set()
    return {id(space) for space, _ in output_places(notebook.shell)} | {*map(id, output_owners(notebook.shell))}


def _of_kind(kind: str, walk: Walk, numbers: dict[int, int]) -> list[tuple[int, Any]]:
    """Return (node, object) of each object of a kind that the graph knows."""
    objects = compress(walk.objects, map(kind.__eq__, walk.kind))
    return [(numbers[id(obj)], obj) for obj in objects if id(obj) in numbers]


def _roots(notebook: Notebook, walk: Walk, kinds: Kinds) -> list[LiveRoot]:
    shell, out, failed = notebook.shell, notebook.out, notebook.failed
    places = [] if shell is None else [(_place_label(name), space[name]) for space, name in output_places(shell)]
    shown = [(label, value) for label, value in places if value is not None and not (type(value) is str and not value)]
    words = partial(describe, kinds=kinds, unread=walk.unread)
    return [
        *user_roots(notebook.namespace, notebook.hidden, out, Cells(notebook.inputs, unbound_names(), unsaid_names()), words),
        *module_roots(walk.referents, notebook.namespace),
        *running_roots(None if failed is None else get_ident()),
        *output_roots(shown, out, words),
        *(error_roots(shell) if failed is None else final_roots(failed, words)),
        *waiting_roots(shell),
        *registry_roots(shell, walk.referents.is_users_function, lambda obj: kinds.of(type(obj)) in EXPERIMENT_KINDS),
    ]


def _place_label(name: str) -> str:
    return "last result" if name == "result" else name


def _walk_from(roots: list[LiveRoot], walk: Walk) -> list[tuple[LiveRoot, list[int]]]:
    """Walk from the user's own roots, then from the stale ones; return each with the numbers of its objects."""
    with_entries = []
    for stale in (False, True):
        first = len(walk.objects)
        walk.most_tensors += stale * MORE_TENSORS
        with_entries += [(root, _entries(walk, root)) for root in roots if (root.kind in STALE_KINDS) is stale]
        walk.run()
    walk.only_stale = range(first, len(walk.objects))
    return with_entries


def _count_entries(roots: list[tuple[LiveRoot, list[int]]], walk: Walk, notebook: Notebook) -> None:
    """Note the objects that roots refer to, each with the number of these references; None where their places are not known."""
    spaces: list[dict[Any, Any]] = [notebook.namespace, *_namespaces_of_modules(roots, walk.kinds)]
    if notebook.shell is not None:
        spaces += [notebook.out, *(space for space, _ in output_places(notebook.shell)), notebook.hidden]
    holders = {id(space): dict.values(space) for space in spaces} | {id(root.objects): root.objects for root, _ in roots}
    # Of a dict of attributes `gc.get_referents` shows nothing from Python 3.13 on: the object itself refers to them.
    known = Counter(map(id, chain.from_iterable(holders.values())))
    counts = {n: known[id(walk.objects[n])] for _, entries in roots for n in entries}
    elsewhere = {n for root, entries in roots if root.kind not in _COUNTED for n in entries}
    walk.entries.update((n, None if n in elsewhere else count) for n, count in counts.items())
    walk.places = set(holders) | _result_places(notebook)


def _namespaces_of_modules(roots: list[tuple[LiveRoot, list[int]]], kinds: Kinds) -> list[dict[str, Any]]:
    """Return the globals of the user's modules."""
    return [kinds.modules[name] for name in {root.module for root, _ in roots if root.kind == "module"}]


def _entries(walk: Walk, root: LiveRoot) -> list[int]:
    return [number for obj in root.objects if (number := walk.add(obj)) is not None]


def _block_sizes(devices: tuple[DeviceFacts, ...]) -> Any:
    """Return a function from a storage to the bytes set aside for it: its allocator block where that is known."""
    known = {device.device for device in devices if device.segments is not None}
    sizes = {
        (device.device, block.address): block.size
        for device in devices
        for segment in (*(device.segments or ()), *(device.airbag.segments if device.airbag else ()))
        for block in segment.blocks
        if block.state != "inactive"
    }

    def nbytes(storage: StorageFact) -> int:
        otherwise = 0 if storage.device in known else storage.nbytes
        return sizes.get((storage.device, storage.address), otherwise)

    return nbytes
