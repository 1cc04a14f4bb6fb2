"""Worker processes of DataLoader iterators, with those that may be ended, the name they are known by, and the cost.

Pure. Workers that a running function or a waiting task reaches, or something that Python does not show (the `for` loop over
them), are in use and are never ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.core import advice
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.finding import Finding
from nbguard.memory.core.least_shown import least_shown
from nbguard.memory.core.processes import WorkersFact, pids_text
from nbguard.memory.core.references.graph import STALE_KINDS, Edge, path_text, reach, shortest_path
from nbguard.memory.core.references.shown_paths import WAITING
from nbguard.units import MiB, counted, format_bytes

Use = Literal["idle", "held", "stale", "in use"]
"""`idle`: a DataLoader keeps them for its next epoch. `held`: of an iterator in mid-epoch that a name of the user's leads to.
`stale`: of an iterator that no name leads to."""


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of one iterator in the words of the user; `edges` are the references that their DataLoaders give up."""

    fact: WorkersFact
    use: Use
    label: str
    edges: frozenset[Edge] = frozenset()

    @property
    def words(self) -> str:
        """Return them in words, e.g. `2 workers of dl`."""
        count = len(self.fact.processes)
        what = counted(count, "worker") if count else "pin-memory thread without workers"
        return f"{what} of {self.label}"

    @property
    def pids(self) -> str:
        """Return their pids in words."""
        return pids_text([process.pid for process in self.fact.processes]) or "no process"


def worker_sets(facts: Facts) -> tuple[WorkerSet, ...]:
    """Return the workers of every iterator that has some."""
    if not facts.workers:
        return ()
    graph = facts.graph
    kept = {
        (parent, fact.node)
        for fact in facts.workers
        if fact.node is not None
        for loader in fact.loaders
        for parent in (loader, *(child for child, label in graph.nodes[loader].references if not label))
        if fact.node in graph.nodes[parent].children
    }
    going_on = (root for root in graph.roots if root.kind == "frame" or root.registry in WAITING)
    running = reach(graph, [node for root in going_on for node in root.nodes])
    users = _reached(facts, {"name", "module"})
    beside = _reached(facts, {"name", "module"}, kept)
    stale = _reached(facts, STALE_KINDS)
    sets = []
    for fact in facts.workers:
        use: Use
        if fact.node is None:
            use = "stale"
        elif fact.is_in_use or fact.node in running:
            use = "in use"
        elif fact.node in users:
            use = "held" if fact.is_midway and fact.node in beside else "idle"
        else:
            use = "stale" if fact.node in stale else "in use"  # only a library's: whose it is cannot be told
        edges = frozenset(edge for edge in kept if edge[1] == fact.node)
        sets.append(WorkerSet(fact, use, _label(facts, fact, use), edges))
    return tuple(sets)


def _reached(facts: Facts, kinds: set[str] | frozenset[str], cut: set[Edge] | frozenset[Edge] = frozenset()) -> set[int]:
    starts = (node for root in facts.graph.roots if root.kind in kinds for node in root.nodes)
    return reach(facts.graph, starts, cut)


def _label(facts: Facts, fact: WorkersFact, use: Use) -> str:
    """Return the shortest way to write where the iterator (or the loader that keeps it) is.

    Of one that is in use, a library's way tells nothing: it is the loop's own `enumerate` or generator, now and then met.
    """
    if fact.node is None:
        return "an iterator that is gone"
    goals = {*fact.loaders} if fact.loaders and use != "held" else {fact.node}
    order = ("name", "module", "frame", "error", "out", "cache", "garbage", "library")
    telling_nothing = STALE_KINDS | {"library"} if use == "in use" else frozenset()
    best: tuple[int, int, str] | None = None
    for root in facts.graph.roots:
        path = shortest_path(facts.graph, root, goals)
        if path and root.kind not in telling_nothing:
            candidate = (order.index(root.kind), len(path), path_text(facts.graph, root, path, shorten=5))
            best = candidate if best is None else min(best, candidate)
    return best[2] if best else "a DataLoader"


def actions_on_workers(facts: Facts, within: set[int] | None) -> Iterator[tuple[Action, frozenset[Edge]]]:
    """Yield the steps that end workers (of iterators among the nodes `within`, if given) with the references they remove."""
    graph = facts.graph
    for workers in worker_sets(facts):
        fact = workers.fact
        if workers.use == "in use" or (within is not None and fact.node not in within):
            continue
        refs = () if fact.node is None else tuple(graph.nodes[node].ref for node in (fact.node, *fact.loaders))
        host = "" if fact.host is None else f", {format_bytes(fact.host)} of host memory"
        detail = f"{workers.pids}{host}; {_AFTERWARDS[workers.use]}"
        yielded = (str(fact.yielded),)  # which shows the step whether somebody went on with it
        yield (
            Action(
                kind="workers",
                subject=workers.words,
                participle="ended",
                nbytes=0,
                detail=detail,
                refs=refs,
                names=yielded,
                host=fact.host or 0,
                processes=fact.processes,
            ),
            workers.edges,
        )


def pinned_action(facts: Facts) -> Action | None:
    """Return the step that gives unused page-locked host memory back, where there is a pinned allocator in use."""
    if facts.pinned is None or facts.pinned.reserved < MiB:  # each value that is read from a device pins some bytes
        return None
    unused = facts.pinned.unused
    if unused is None:
        detail = f"how much of {format_bytes(facts.pinned.reserved)} that is, this PyTorch does not tell"
    else:
        detail = f"{format_bytes(unused)} of host memory now, plus the memory that this cleanup adds"
    return Action(
        kind="pinned",
        subject="pinned host memory that nothing uses",
        participle="given back",
        nbytes=0,
        detail=detail,
        host=unused,
    )


_AFTERWARDS = {
    "idle": "the next epoch starts new ones",
    "held": "in mid-epoch: the remaining batches are lost, and next() on it says so",
    "stale": "no name leads to them",
}


def workers_left(facts: Facts, within: set[int] | None) -> Iterator[str]:
    """Yield, in words, the workers that a plan leaves running, and why."""
    for workers in worker_sets(facts):
        if workers.use == "in use" and (within is None or workers.fact.node in within):
            yield f"{workers.words} ({workers.pids}) keep running: running code uses them"


def idle_workers(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for workers that wait: for the next epoch, or for a `next()` that may never come.

    Not for those that are known to have little host memory.
    """
    found = list(worker_sets(facts))
    least = least_shown(sum(workers.fact.host or 0 for workers in found))
    for workers in found:
        if workers.fact.host is not None and workers.fact.host < least:
            continue
        count = len(workers.fact.processes)
        host = "" if workers.fact.host is None else f" ({format_bytes(workers.fact.host)} of host memory)"
        if workers.use == "idle":
            yield Finding(
                "workers",
                f"{workers.label} keeps {counted(count, 'idle worker')}{host}: "
                + advice.end_workers().code
                + " ends them, the "
                "next epoch starts new ones",
                advice.end_workers(),
            )
        elif workers.use == "held":
            is_name = any(root.kind == "name" and root.label == workers.label for root in facts.graph.roots)
            end = advice.release_names((workers.label,)) if is_name and not workers.fact.loaders else advice.end_workers()
            sentence = (
                f"{workers.label} keeps {counted(count, 'worker')} running in mid-epoch{host}: " + end.code + " ends them"
            )
            yield Finding("workers", sentence, end)
        elif workers.use == "stale":
            run, it = ("runs", "it") if count == 1 else ("run", "them")
            sentence = f"{workers.words} {run} though no name leads to {it}{host}"
            yield Finding("workers", f"{sentence}: " + advice.end_workers().code + f" ends {it}", advice.end_workers())
