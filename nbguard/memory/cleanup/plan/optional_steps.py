"""Steps of a cleanup that the user has to ask for, as they take something that is in use, such as a loader's workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Literal

from nbguard.memory.cleanup.plan.builder import PlanBuilder
from nbguard.memory.cleanup.plan.plan import Action, ActionKind
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Finding, least_shown
from nbguard.memory.core.facts import DEBUGGER, Facts, Graph
from nbguard.memory.core.processes import WorkersFact, pids_text
from nbguard.memory.core.references.graph import (
    DEFAULT,
    FUNCTION,
    STALE_KINDS,
    Edge,
    leading_to,
    nbytes_of,
    path_text,
    reach,
    shortest_path,
    storages_of,
)
from nbguard.memory.core.references.holders import workspace_blocks
from nbguard.memory.core.references.owner_sets import owners_of_nodes
from nbguard.memory.core.references.releases import caches_worth_emptying
from nbguard.memory.core.references.shown_paths import WAITING
from nbguard.units import MiB, counted, format_bytes

# --- The parts of the last error, and the references that go when an object that it holds is replaced by a stand-in.


def shell_of(graph: Graph, entries: Iterable[int]) -> set[int]:
    """Return the exceptions, tracebacks and frames that make up an error's own chain, and no others.

    A tuple or dict right below an exception (a group's parts) or at the top (a debugger's leftovers) is passed through.
    """
    shell: set[int] = set()
    todo = [(node, True) for node in entries]
    while todo:
        node, may_pass = todo.pop()
        fact = graph.nodes[node]
        if fact.kind in ("frame", "traceback", "locals"):
            if node not in shell:
                shell.add(node)
                todo += [(child, fact.kind == "traceback") for child in fact.children]
        elif may_pass and fact.type_name in ("tuple", "dict"):
            todo += [(child, False) for child in fact.children]
    return shell


def variables_of_error(graph: Graph) -> set[int]:
    """Return the nodes that variables of the last error's frames are: among them the Learner whose fit failed."""
    entries = [node for root in graph.roots if root.kind == "error" and root.label != DEBUGGER for node in root.nodes]
    return {child for owner in shell_of(graph, entries) for child, _, _ in parts_of_error(graph, owner)}


@dataclass(frozen=True, slots=True)
class ReleasedParts:
    """Parts of an error that give way to stand-ins: references that go, (owner, object) refs in turn, names, owners."""

    cut: set[Edge]
    refs: tuple[int, ...]
    names: tuple[str, ...]
    owners: set[int]

    def action(self, kind: ActionKind, words: str, detail: str) -> Action:
        """Return the step that releases them; `words` say which they are, without a verb."""
        return Action(
            kind=kind,
            subject=words,
            participle="released",
            nbytes=0,
            detail=detail,
            refs=self.refs,
            names=self.names,
        )


def released_parts(graph: Graph, shell: Iterable[int], wanted: Set[int], done: Set[Edge] = frozenset()) -> ReleasedParts:
    """Return the parts of the exceptions and frames `shell` that are `wanted`, but for those that are `done` already."""
    cut, refs, names, owners = set[Edge](), list[int](), list[str](), set[int]()
    for owner in sorted(shell):
        for child, label, edges in parts_of_error(graph, owner):
            if child in wanted and not edges <= done:
                cut |= edges
                refs += [graph.nodes[owner].ref, graph.nodes[child].ref]
                names.append(label)
                owners.add(owner)
    return ReleasedParts(cut, tuple(refs), tuple(names), owners)


def parts_of_error(graph: Graph, owner: int) -> Iterable[tuple[int, str, set[Edge]]]:
    """Return the objects that a part of an error holds, each with the references that go when it is replaced.

    Of a frame its variables, and the defaults and attributes of the function that it ran, which it keeps (where anything
    else has that function, these are live); of an exception `AttributeError.obj` and the attributes that somebody has put on
    it. Its arguments stay: they are its message.
    """
    fact = graph.nodes[owner]
    if fact.kind == "frame":
        variables = [variable for variable in _variables(graph, owner) if variable[1] not in ("", FUNCTION)]
        parts = [(child, label, _release_edges(graph, owner, child)) for child, label in variables]
        return parts + _parts_of_function(graph, owner)
    if fact.kind == "locals":
        return []
    parts = [(child, label, {(owner, child)}) for child, label in fact.references if label == ".obj"]
    return parts + _attributes(graph, owner)


def _parts_of_function(graph: Graph, frame: int) -> list[tuple[int, str, set[Edge]]]:
    parts: list[tuple[int, str, set[Edge]]] = []
    for function, label in graph.nodes[frame].references:
        if label in ("", FUNCTION) and graph.nodes[function].type_name == "function":
            parts += [(part, DEFAULT, {(function, part)}) for part, step in graph.nodes[function].references if step == DEFAULT]
            parts += _attributes(graph, function)
    return parts


def _attributes(graph: Graph, owner: int) -> list[tuple[int, str, set[Edge]]]:
    """Return the attributes of a node as parts of it."""
    spaces = [child for child, label in graph.nodes[owner].references if not label and graph.nodes[child].type_name == "dict"]
    return [(child, label, {(space, child)}) for space in spaces for child, label in graph.nodes[space].references]


def _variables(graph: Graph, frame: int) -> Iterable[tuple[int, str]]:
    """Return (node, label) of each variable of a finished frame: its own, and the variables of the namespace it keeps."""
    fact = graph.nodes[frame]
    variables = dict(fact.references)
    for view in [child for child in fact.children if graph.nodes[child].kind == "locals"]:
        for child, label in graph.nodes[view].references:
            variables.setdefault(child, label)
    return variables.items()


def _release_edges(graph: Graph, frame: int, variable: int) -> set[Edge]:
    """Return the references that go when a variable of a finished frame is replaced.

    A variable that closures share lives in a cell, whose content goes. Up to Python 3.12 a debugger's view of the frame is
    one dict that the frame keeps (kind `locals`): it follows.
    """
    nodes = graph.nodes
    is_cell = nodes[variable].kind == "cell"
    values = set(nodes[variable].children) if is_cell else {variable}
    cut = {(variable, value) for value in values} if is_cell else {(frame, variable)}
    views = [child for child in nodes[frame].children if nodes[child].kind == "locals"]
    return cut | {(view, value) for view in views for value in values if value in nodes[view].children}


# --- Worker processes of DataLoader iterators, with those that may be ended, the name they are known by, and the cost.
#
# Pure. Workers that a running function or a waiting task reaches, or something that Python does not show (the `for` loop over
# them), are in use and are never ended.


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


def kept_errors(graph: Graph) -> dict[str, set[int]]:
    """Return the exceptions that the user's names lead to (a variable, a future, a task, a list of them), by name.

    An exception that a running function leads to as well is in use: it is left out.
    """
    exceptions = {n for n, node in enumerate(graph.nodes) if node.is_error}
    exceptions -= reach(graph, (n for root in graph.roots if root.kind == "frame" for n in root.nodes))
    if not exceptions:
        return {}
    named = [root for root in graph.roots if root.kind in ("name", "module")]
    owners = owners_of_nodes(graph, [root.nodes for root in named])
    by_name = {root.label: {n for n in exceptions if owners[n] >> number & 1} for number, root in enumerate(named)}
    return {label: errors for label, errors in by_name.items() if errors}


def held_by_errors(graph: Graph, errors: Set[int]) -> int:
    """Return the bytes that only the frames of these exceptions hold, among the objects that the user's own roots lead to."""
    own = {node for root in graph.roots if root.kind not in STALE_KINDS for node in root.nodes}
    shell = shell_of(graph, errors)
    return nbytes_of(graph, storages_of(graph, reach(graph, own)) - storages_of(graph, reach(graph, own, blocked=shell)))


def release_kept_errors(builder: PlanBuilder) -> None:
    """Release the variables in frames of exceptions that the user keeps. The exceptions stay, with message and lines."""
    graph = builder.graph
    by_name = kept_errors(graph)
    shell = shell_of(graph, {n for errors in by_name.values() for n in errors})
    holding = (number for number, node in enumerate(graph.nodes) if node.storages)
    leading = leading_to(graph, holding, blocked=builder.live(blocked=shell) | shell)
    for name, errors in by_name.items():
        parts = released_parts(graph, shell_of(graph, errors), leading, builder.cut)
        if parts.cut:
            what = f"{name}: {counted(len(parts.names), 'variable')} of its exception's frames"
            detail = "the exception stays, with its message and its lines"
            builder.add(parts.action("kept_error", what, detail), cut=parts.cut)


def drop_compiled(builder: PlanBuilder) -> None:
    """Drop code that torch.compile compiled, for live models too, which compile again at their next call."""
    if any(learner.is_running for learner in builder.facts.learners):
        builder.skipped.append("compiled code stays because a running fit uses it")
    elif not builder.facts.has_compiled:
        builder.skipped.append("nothing has been compiled here (torch.compile): there is nothing to drop")
    else:
        builder.add(
            Action(
                kind="compiled",
                subject="compiled code",
                participle="dropped",
                nbytes=None,
                detail="live models compile again at their next call",
            )
        )


def empty_function_caches(builder: PlanBuilder, given_up: set[int] | None) -> None:
    """Empty the caches of functions that alone keep memory alive, or with targets only those that lead to these."""
    graph = builder.graph
    stale = {number for number, root in enumerate(graph.roots) if root.kind in STALE_KINDS}  # the steps after this one
    caches = caches_worth_emptying(graph, builder.gone | stale, builder.cut, given_up)
    if not caches:
        builder.skipped.append("no cache of a function (lru_cache) keeps memory alive by itself: there is nothing to empty")
    for node, edges in caches.items():
        builder.add(
            Action(
                kind="function_cache",
                subject=_cache_label(graph, node),
                participle="emptied",
                nbytes=0,
                detail="the function computes again at its next call; this cannot be undone",
                refs=(graph.nodes[node].ref,),
            ),
            cut=edges,
        )


def _cache_label(graph: Graph, node: int) -> str:
    """Return how one writes the function, from the root that tells most."""
    ways = ((root, shortest_path(graph, root, {node})) for root in graph.roots if root.kind not in STALE_KINDS)
    texts = [path_text(graph, root, way) for root, way in ways if way]
    return f"cache of {min(texts, key=len)}" if texts else "cache of a function"


def end_workers(builder: PlanBuilder, given_up: set[int] | None) -> None:
    """End the workers of DataLoaders that nothing runs over; with targets, of DataLoaders that the targets lead to."""
    for action, cut in actions_on_workers(builder.facts, given_up):
        builder.add(action, cut=cut)
    builder.skipped += workers_left(builder.facts, given_up)


def give_pinned_memory_back(builder: PlanBuilder) -> None:
    """Give page-locked host memory back that nothing uses."""
    if (pinned := pinned_action(builder.facts)) is not None:
        builder.add(pinned)


@dataclass(frozen=True, slots=True)
class Workspaces:
    """The workspaces that a cleanup may clear: addresses by device, and the step that does it. `why_not` says why none."""

    nbytes: int = 0
    addresses: dict[str, frozenset[int]] = field(default_factory=dict)
    why_not: str = ""

    @property
    def action(self) -> Action:
        """Return the step that clears them."""
        return Action(
            kind="workspaces",
            subject="cuBLAS workspaces",
            participle="cleared",
            nbytes=self.nbytes,
            detail="the next matrix product makes new ones",
        )


def clearable_workspaces(facts: Facts) -> Workspaces:
    """Return the workspaces that may go now.

    None while a function runs, which may be about to use one, nor where a CUDA graph is: it may have one recorded, and a
    replay would write to memory that is no longer its own.
    """
    by_device = {
        device.device: workspace_blocks(facts.graph, device) for device in facts.devices if device.segments and device.workspace
    }
    nbytes = sum(block.size for blocks in by_device.values() for block in blocks)
    if not nbytes:
        return Workspaces()
    if any(root.kind == "frame" for root in facts.graph.roots) or any(learner.is_running for learner in facts.learners):
        return Workspaces(why_not="cuBLAS workspaces stay because a running function may use them")
    if facts.pools or any(segment.is_private for device in facts.devices for segment in device.segments or ()):
        return Workspaces(why_not="cuBLAS workspaces stay because a CUDA graph may have recorded them")
    return Workspaces(nbytes, {device: frozenset(block.address for block in blocks) for device, blocks in by_device.items()})


def clear_workspaces(builder: PlanBuilder) -> Workspaces:
    """Clear the workspaces of cuBLAS, where that is safe, and return them."""
    workspaces = clearable_workspaces(builder.facts)
    if workspaces.nbytes:
        builder.add(workspaces.action)
    elif workspaces.why_not:
        builder.skipped.append(workspaces.why_not)
    return workspaces


def words_on_kept_error(label: str, nbytes: int) -> str:
    """Return the sentence on a name whose exception holds memory."""
    return (
        f"{label} keeps an exception whose frames hold {format_bytes(nbytes)}: "
        + advice.release_errors().code
        + " releases them "
        "and keeps the exception"
    )
