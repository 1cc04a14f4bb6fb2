"""Plan a cleanup: which references to let go, in which order, and the bytes each will give back.

Pure: a plan is computed from facts by taking references out of the graph and looking at what is still reached. Nothing is
touched. What a user-reachable name leads to is *live*: a plan may remove other references to it, never the thing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field

from nbguard.core.facts import DEBUGGER, EXPERIMENT_KINDS, Facts, Graph
from nbguard.core.last_error import parts_of_error, shell_of
from nbguard.core.ownership import STALE_KINDS, Edge, nbytes_of, reach, reach_of_roots, storages_of
from nbguard.core.plan import Action, ActionKind, Plan, Request, Target
from nbguard.core.pools import pools_in_use, returnable

_HARMLESS = frozenset({"loss_grad", "progress.pbar", "progress.mbar"})
_LOSS = 1024
"""A fit that ended well leaves these too: the bare number of the loss, bars over a loader still in use. Not worth a word
unless more bytes than this come back."""


@dataclass
class _Draft:
    """A plan in the making: references gone so far, and what is still reached without them."""

    facts: Facts
    gone: set[int] = field(default_factory=set)
    cut: set[Edge] = field(default_factory=set)
    actions: list[Action] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)

    @property
    def graph(self) -> Graph:
        return self.facts.graph

    def __post_init__(self) -> None:
        self.alive = self.reached_storages()

    def reached_storages(self, and_cut: Set[Edge] = frozenset()) -> set[int]:
        """Return the storages that are still reached, also without the references in `and_cut`."""
        return storages_of(self.graph, self.reached(and_cut))

    def reached(self, and_cut: Set[Edge] = frozenset()) -> set[int]:
        """Return the nodes that are still reached, also without the references in `and_cut`."""
        left = (number for number in range(len(self.graph.roots)) if number not in self.gone)
        return reach_of_roots(self.graph, left, self.cut | and_cut)

    def live(self, blocked: Collection[int] = ()) -> set[int]:
        """Return the nodes that the user's own roots reach, after what was given up so far, not through `blocked`."""
        roots = (root for n, root in enumerate(self.graph.roots) if root.kind not in STALE_KINDS and n not in self.gone)
        return reach(self.graph, (node for root in roots for node in root.nodes), self.cut, blocked)

    def add(self, action: Action, gone: Iterable[int] = (), cut: Iterable[Edge] = ()) -> None:
        """Append `action`, with the bytes that only it gives back."""
        self.gone.update(gone)
        self.cut.update(cut)
        alive = self.reached_storages()
        nbytes = action.nbytes if action.nbytes is None else nbytes_of(self.graph, self.alive - alive)
        self.alive = alive
        self.actions.append(Action(action.kind, action.label, nbytes, action.detail, action.refs, action.names))


def plan_cleanup(facts: Facts, request: Request) -> Plan:
    """Return what `request` would do to the process that `facts` describe, with the bytes it promises."""
    draft = _Draft(facts)
    before = set(draft.alive)
    given_up: set[int] | None = None
    if request.everything:
        request = Request(_everything(facts.graph, request.keep), request.keep, everything=True)
    if request.targets:
        given_up = _give_up(draft, request.targets)
    if given_up is None:
        _clear_leftovers(draft)
    _note_what_is_hidden(draft)
    live = draft.live() | _kept_out(draft, request, given_up)
    _drop_out(draft, live)
    _release_error(draft, live, given_up, request)
    _drop_caches(draft, live, given_up)
    _collect(draft)
    storages = frozenset(before - draft.alive)
    return Plan(
        request,
        tuple(draft.actions),
        storages,
        nbytes_of(facts.graph, storages),
        _reserved(draft, storages),
        tuple(draft.skipped),
    )


def _note_what_is_hidden(draft: _Draft) -> None:
    """Say what a plan cannot see; a cleanup first makes it seen."""
    if draft.facts.frozen_objects:
        draft.skipped.append(f"gc.freeze() hides {draft.facts.frozen_objects:,} objects: %reset_gpu unfreezes them, then looks")
    if draft.facts.is_autocast_on:
        draft.skipped.append("autocast is on: %reset_gpu empties its cache of weights, then looks")


def _everything(graph: Graph, keep: Iterable[str]) -> tuple[Target, ...]:
    """Return every name of the namespace that leads to memory, but code (functions, classes) and what is to be kept."""
    kept = set(keep)
    return tuple(
        Target(root.label, root=root.label)
        for root in graph.roots
        if root.kind == "name" and root.label not in kept and not all(graph.nodes[node].kind == "code" for node in root.nodes)
    )


def _give_up(draft: _Draft, targets: Iterable[Target]) -> set[int]:
    """Take the references that the targets name out of the graph; return all nodes that they led to."""
    graph, given_up = draft.graph, set[int]()
    by_ref = {node.ref: number for number, node in enumerate(graph.nodes)}
    for target in targets:
        gone = {n for n, root in enumerate(graph.roots) if target.root and root.label == target.root}
        value = by_ref.get(target.value)
        cut = {(by_ref[c], value) for c in target.containers if c in by_ref} if value is not None else set()
        entries = {node for root in gone for node in graph.roots[root].nodes} | {child for _, child in cut}
        if target.is_known and not entries:
            draft.skipped.append(
                f"{target.text} ({target.value_kind}) leads to no tensor, model or loader on {draft.facts.tracked}: "
                "left as it is"
            )
            continue
        given_up |= reach(graph, entries)
        kind: ActionKind = "out" if any(graph.roots[root].kind == "out" for root in gone) else "del"
        refs = tuple(graph.nodes[node].ref for root in gone for node in graph.roots[root].nodes) if kind == "out" else ()
        label = f"{target.text} forgotten" if kind == "out" else f"del {target.text}"
        draft.add(Action(kind, label, 0 if target.is_known else None, refs=refs, names=(target.text,)), gone, cut)
    return given_up


def _kept_out(draft: _Draft, request: Request, given_up: set[int] | None) -> set[int]:
    """Return the nodes that displayed results reach which stay in `Out`: the user may have no other name for them."""
    live = draft.live()
    kept: set[int] = set()
    for number, root in enumerate(draft.graph.roots):
        if root.kind == "out" and number not in draft.gone:
            reached = reach(draft.graph, root.nodes)
            if root.label in request.keep or not _may_drop(draft.graph, root.nodes, reached, live, given_up):
                kept |= reached
    return kept


def _may_drop(graph: Graph, entries: tuple[int, ...], reached: set[int], live: set[int], given_up: set[int] | None) -> bool:
    """Say whether a displayed result may be forgotten.

    By what it reaches, not by its type: it must lead to an experiment (or to what was given up) that no name needs, and to
    no loose data (a tensor, an array) besides, which could be the user's only copy.
    """
    if live.issuperset(entries):
        return False
    stale = reached - live
    if given_up is not None and not stale & given_up:
        return False
    if given_up is not None and given_up.issuperset(entries):
        return True
    experiments = {node for node in reached if graph.nodes[node].kind in EXPERIMENT_KINDS}
    if not experiments & stale:
        return False
    part_of_them = reach(graph, experiments)
    return not any(graph.nodes[node].kind in ("tensor", "data") for node in stale - part_of_them)


def _drop_out(draft: _Draft, live: set[int]) -> None:
    graph = draft.graph
    for number, root in enumerate(graph.roots):
        if root.kind != "out" or number in draft.gone or live.issuperset(reach(graph, root.nodes)):
            continue
        refs = tuple(graph.nodes[node].ref for node in root.nodes)
        draft.add(Action("out", f"{root.label}: {root.what} forgotten", 0, refs=refs, names=(root.label,)), {number})


def _drop_caches(draft: _Draft, live: set[int], given_up: set[int] | None) -> None:
    """Let go of copies that only their owner's cache still holds: of a script's globals, of what `%store` wrote, of figures."""
    graph = draft.graph
    for number, root in enumerate(graph.roots):
        if root.kind == "cache" and any(_leads_to(graph, node, live, given_up) for node in root.nodes if node not in live):
            refs = tuple(graph.nodes[node].ref for node in root.nodes)
            draft.add(Action("cache", f"{root.label} forgotten", 0, root.what, refs, (root.label,)), {number})


def _release_error(draft: _Draft, live: set[int], given_up: set[int] | None, request: Request) -> None:
    """Release what the frames of the last error hold, variable by variable; the frames stay, so `%tb` and `%debug` do."""
    graph = draft.graph
    for number, root in enumerate(graph.roots):
        if root.kind != "error" or root.label in request.keep:
            continue
        reached = reach(graph, root.nodes, draft.cut) - live
        if root.label == DEBUGGER:
            if given_up is None or reached & given_up:
                draft.add(Action("debugger", f"{DEBUGGER}: {root.what} forgotten", 0), {number})
            continue
        shell = shell_of(graph, root.nodes) & reached
        cut: set[Edge] = set()
        refs: list[int] = []
        names: list[str] = []
        owners: set[int] = set()
        for owner in sorted(shell):
            for child, label, edges in parts_of_error(graph, owner):
                if child in live or child in shell or not _leads_to(graph, child, live | shell, given_up):
                    continue
                cut |= edges
                refs += [graph.nodes[owner].ref, graph.nodes[child].ref]
                names.append(label)
                owners.add(owner)
        if cut:
            s = "s" if len(names) > 1 else ""
            label = f"last error: {len(names)} variable{s} of {len(owners)} frame{'s' if len(owners) > 1 else ''} released"
            draft.add(
                Action("error", label, 0, "%tb and %debug still work, with stand-ins", tuple(refs), tuple(names)),
                cut=cut,
            )


def _leads_to(graph: Graph, start: int, blocked: Set[int], given_up: set[int] | None) -> bool:
    """Say whether `start` leads to memory or an experiment that is not live (and, with targets, was given up)."""
    for node in reach(graph, (start,), blocked=blocked):
        fact = graph.nodes[node]
        if (fact.storages or fact.kind in EXPERIMENT_KINDS) and (given_up is None or node in given_up):
            return True
    return False


def _clear_leftovers(draft: _Draft) -> None:
    """Drop what an interrupted fit left on a Learner that is kept and idle: the batch, the prediction, the graph.

    A Learner that only an exception of the user's leads to stays as the exception left it.
    """
    graph = draft.graph
    live = draft.live(blocked={n for n, node in enumerate(graph.nodes) if node.kind in ("frame", "traceback")})
    for learner in draft.facts.learners:
        if learner.node not in live or learner.is_running or not learner.leftovers:
            continue
        cut = {edge for name in learner.leftovers for edge in _attribute_edges(graph, learner.node, name)}
        freed = nbytes_of(graph, draft.alive - draft.reached_storages(cut))
        if cut and (freed >= _LOSS or not _HARMLESS.issuperset(learner.leftovers)):
            label = f"{learner.summary}: {', '.join(learner.leftovers)} of its last batch cleared"
            draft.add(Action("leftovers", label, 0, refs=(graph.nodes[learner.node].ref,), names=learner.leftovers), cut=cut)


def _attribute_edges(graph: Graph, owner: int, name: str) -> set[Edge]:
    """Return the references that go when the attribute `name` of the node `owner` (`xb`, `progress.pbar`) is removed."""
    first, _, rest = name.partition(".")
    places = {owner, *(child for child, label in graph.nodes[owner].references if not label)}
    edges = {(place, child) for place in places for child, label in graph.nodes[place].references if label == f".{first}"}
    return {edge for _, child in edges for edge in _attribute_edges(graph, child, rest)} if rest else edges


def _collect(draft: _Draft) -> None:
    garbage = {n for n, root in enumerate(draft.graph.roots) if root.kind == "garbage"}
    what = ", ".join(draft.graph.roots[n].what for n in sorted(garbage))
    draft.add(Action("collect", "unreachable cycles collected", 0, what), garbage)


def _reserved(draft: _Draft, storages: Set[int]) -> int | None:
    """Return the bytes `empty_cache` will give back to the devices once `storages` are free, or None without segments."""
    devices = [device for device in draft.facts.devices if device.segments is not None]
    if not devices:
        return None
    in_use = pools_in_use(draft.facts, draft.reached())
    return sum(returnable(draft.facts, device, storages, in_use) for device in devices)
