"""The workers behind torch's DataLoader iterators."""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import replace
from typing import Any

from nbguard.memory.core.processes import Process, WorkersFact
from nbguard.memory.scan.devices.processes import is_child, private_bytes, process_of, shared_bytes
from nbguard.memory.scan.heap.kinds import Kinds, attribute_of, attributes_of, never_asked
from nbguard.memory.scan.heap.walk import Walk, references_by_asking


def workers_facts(
    walk: Walk, iterators: list[tuple[int, Any]], numbers: dict[int, int], own: set[int]
) -> tuple[WorkersFact, ...]:
    """Return a fact for each of the `iterators`, (node, object), whose processes or pin-memory thread still run.

    `numbers` are the nodes of the objects that the graph knows, by id, `own` the ids of the scan's own objects.
    """
    facts = _of_iterators(walk, iterators, numbers, own)
    strays = _strays({process for fact in facts for process in fact.processes})
    return (*facts, _fact_on(strays)) if strays else facts


_seen: set[Process] = set()
"""Workers that a scan met and that were not gone by the last one, as pids and starts, nothing of the user's."""


def _strays(known: set[Process]) -> tuple[Process, ...]:
    """Return the workers met before that still run without an iterator: an interrupt has cut their end short.

    Not while frozen objects hide iterators from a scan; and never workers that a process that we were forked from has started.
    """
    mine = {process for process in _seen - known if is_child(process)}
    _seen.clear()
    _seen.update(known | mine)
    are_all_seen = bool(mine) and not gc.get_freeze_count()  # it counts one by one: asked only where it matters
    return tuple(sorted(mine, key=lambda process: process.pid)) if are_all_seen else ()


def _of_iterators(
    walk: Walk, iterators: list[tuple[int, Any]], numbers: dict[int, int], own: set[int]
) -> tuple[WorkersFact, ...]:
    running = {id(iterator): node for node, iterator in iterators if worker_processes(iterator) or _pin_thread(iterator)}
    del iterators[:]  # the contents of lists are counted below
    if not running:
        return ()
    at = {key: walk.number[key] for key in running}
    held = _held_unseen(walk, at, own)
    loaders = _loaders(walk, running, numbers)
    return tuple(_fact(walk.objects[at[key]], node, loaders.get(key, ()), key in held) for key, node in running.items())


def worker_pids() -> frozenset[int]:
    """Return the pids of the workers of all DataLoader iterators in this process."""
    iterators = Kinds().tracked({"iterator"})
    return frozenset(process.pid for iterator in iterators for process in worker_processes(iterator))


def worker_processes(iterator: Any) -> tuple[Process, ...]:
    """Return the processes of an iterator that still run."""
    workers = attribute_of(iterator, "_workers")
    processes = []
    for worker in workers if type(workers) is list else ():
        popen = attribute_of(worker, "_popen")
        pid = attribute_of(popen, "pid")
        process = process_of(pid) if type(pid) is int else None
        if process is not None:
            processes.append(process)
    return tuple(processes)


def _pin_thread(iterator: Any) -> bool:
    thread = attribute_of(iterator, "_pin_memory_thread")
    return type(thread) is threading.Thread and thread.is_alive()


def _fact(iterator: Any, node: int, loaders: tuple[int, ...], is_in_use: bool) -> WorkersFact:
    attributes = attributes_of(iterator) or {}
    processes = worker_processes(iterator)
    sent, received = (_count(attributes.get(name)) for name in ("_send_idx", "_rcvd_idx"))
    return replace(
        _fact_on(processes),
        node=node,
        loaders=loaders,
        yielded=_count(attributes.get("_num_yielded")),
        is_midway=sent > received and attributes.get("_shutdown") is not True,
        is_in_use=is_in_use,
    )


def _fact_on(processes: tuple[Process, ...]) -> WorkersFact:
    """Return the system's figures on workers, such as the memory that comes back when they end."""
    private = [private_bytes(process.pid) for process in processes]
    shared = [shared_bytes(process.pid) for process in processes]
    return WorkersFact(
        node=None,
        processes=processes,
        private=None if None in private else sum(nbytes or 0 for nbytes in private),
        shared=None if None in shared else sum(nbytes or 0 for nbytes in shared),
    )


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _loaders(walk: Walk, running: dict[int, int], numbers: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Return the nodes of the DataLoaders that keep each iterator for their next epoch, by the iterator's id."""
    by_iterator: dict[int, tuple[int, ...]] = {}
    for place, kind in enumerate(walk.kind):
        if kind == "loader":
            loader = walk.objects[place]
            kept = id(attribute_of(loader, "_iterator"))
            if kept in running and id(loader) in numbers:
                by_iterator[kept] = (*by_iterator.get(kept, ()), numbers[id(loader)])
    return by_iterator


def _is_made_since(holder: Any, walk: Walk) -> bool:
    """Say whether a holder is the attribute dict of an object that the walk met: CPython makes it when first asked for."""
    return type(holder) is dict and any(
        id(owner) in walk.number and attributes_of(owner) is holder for owner in gc.get_referrers(holder)
    )


def _held_unseen(walk: Walk, at: dict[int, int], own: set[int]) -> set[int]:
    """Return the ids of the iterators, among these (id: number in the walk), with more referrers than the walk met.

    The loop that runs over an iterator keeps it where Python shows it to nobody: on the stack of its frame. So does an object
    between the two (`enumerate`, a generator), which then is an object that no root leads to.
    """
    counted = dict.fromkeys(at, 0)
    asked = tuple([walk.objects[number] for number in at.values()])
    ignored = {id(asked), id(walk.objects), id(sys._getframe()), id(never_asked())}
    unseen = set()
    for holder in gc.get_referrers(*asked):
        if id(holder) in ignored:
            continue
        is_met = id(holder) in walk.number or id(holder) in walk.stop or id(holder) in own or _is_made_since(holder, walk)
        for ref in gc.get_referents(holder):
            if id(ref) in counted:
                counted[id(ref)] += 1
                if not is_met:
                    unseen.add(id(ref))
    ref = holder = None  # objects that loop variables still hold would be counted
    del asked
    ours = references_by_asking()
    objects = walk.objects
    return unseen | {key for key, number in at.items() if sys.getrefcount(objects[number]) - ours > counted[key]}
