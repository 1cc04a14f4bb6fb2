"""The builder of a cleanup plan, with steps that take references out of a graph, and the nodes still reached without them.

The bytes of each step are known once all steps are: the nodes left at the end are walked once, then the steps are undone from
the last to the first, and a step frees the storages that undoing it reaches again. One pass, however many steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace

from nbguard.libraries import harmless_leftovers
from nbguard.memory.cleanup.plan.plan import Action
from nbguard.memory.core.facts import Facts, Graph, LearnerFact, Root
from nbguard.memory.core.references.graph import STALE_KINDS, Edge, leading_to, nbytes_of, reach, storages_of, without
from nbguard.memory.core.references.owner_sets import bits_of, components, owners_of_nodes, owners_of_storages
from nbguard.texts import joined

COLLECTED = "unreachable cycles"
"""The objects that the collector takes, in the words that leave them out of a request."""
_WITH_MEMORY = frozenset({"del", "cut", "line", "out", "cache", "leftovers", "debugger", "error", "kept_error"})
"""Kinds of steps that are expected to free memory: one that frees none says why."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """An action with the roots and references that it removes and no earlier step has."""

    action: Action
    gone: frozenset[int]
    cut: frozenset[Edge]


@dataclass(frozen=True, slots=True)
class Settled:
    """A plan's actions with their bytes, the storages that go, and the nodes that stay reached."""

    actions: tuple[Action, ...]
    storages: frozenset[int]
    alive: frozenset[int]
    at_least: bool  # the removed objects lead to the rest that the scan left out


@dataclass(kw_only=True)
class PlanBuilder:
    """A cleanup plan so far."""

    facts: Facts  # the scan that it is made for
    keep: Collection[str] = ()  # keys of steps that are left out
    gone: set[int] = field(default_factory=set)  # numbers of the roots that the steps remove
    cut: set[Edge] = field(default_factory=set)  # references that the steps remove
    steps: list[PlannedStep] = field(default_factory=list)  # in the order of their run
    skipped: list[str] = field(default_factory=list)  # sentences on requests that will not be carried out

    @property
    def graph(self) -> Graph:
        """Return the graph that the plan is made for."""
        return self.facts.graph

    def add(self, action: Action, gone: Iterable[int] = (), cut: Iterable[Edge] = ()) -> None:
        """Append a step, unless it is left out. The bytes that it frees are added to its `nbytes`; None stays: not known."""
        if action.key in self.keep:
            return
        step = PlannedStep(action, frozenset(gone) - self.gone, frozenset(cut) - self.cut)
        self.gone |= step.gone
        self.cut |= step.cut
        self.steps.append(step)

    def live(self, blocked: Collection[int] = ()) -> set[int]:
        """Return the nodes that the user's own roots reach without the references removed so far, not through `blocked`."""
        roots = (root for n, root in enumerate(self.graph.roots) if root.kind not in STALE_KINDS and n not in self.gone)
        return reach(self.graph, (node for root in roots for node in root.nodes), self.cut, blocked)

    def below(self, starts: Iterable[int], blocked: Collection[int] = ()) -> set[int]:
        """Return the nodes that `starts` lead to without the references removed so far, not through `blocked`."""
        return reach(self.graph, starts, self.cut, blocked)

    def collect(self, given_up: Set[int] | None) -> None:
        """Append the step that has Python's collector take cycles which nothing reaches.

        Of a plan for targets it takes those that lead to memory of the nodes `given_up` which nothing else leads to any more,
        and of a plan that leaves it out none: the rest is held meanwhile, as the collector takes all that nothing holds.
        """
        waiting = [number for number, root in enumerate(self.graph.roots) if root.kind == "garbage"]
        entries = {node for number in waiting for node in self.graph.roots[number].nodes}
        is_left_out = COLLECTED in self.keep
        taken = set[int]() if is_left_out else entries
        if given_up is not None and taken:
            held = (node for n, root in enumerate(self.graph.roots) if n not in {*self.gone, *waiting} for node in root.nodes)
            free = storages_of(self.graph, given_up) - storages_of(self.graph, reach(self.graph, held, self.cut))
            carriers = (number for number, node in enumerate(self.graph.nodes) if not free.isdisjoint(node.storages))
            taken = taken & leading_to(self.graph, carriers, self.cut)
        staying = self._kept_alive(entries, entries - taken) if taken != entries else set[int]()
        if staying:
            self._leave(staying)
        whats = (root.what for root in self.graph.roots if root.kind == "garbage" and taken.intersection(root.nodes))
        step = Action(
            kind="collect",
            subject=COLLECTED,
            participle="collected",
            nbytes=0,
            detail="" if staying else ", ".join(whats),
            refs=tuple(sorted(self.graph.nodes[node].ref for node in staying)),
        )
        planned = PlannedStep(step, frozenset(waiting), frozenset())
        self.gone |= planned.gone
        self.steps.append(planned)

    def _kept_alive(self, entries: set[int], left: set[int]) -> set[int]:
        """Return the nodes `left` that stay when the other `entries` are collected (cycles and the objects these lead to)."""
        children = [node.children for node in self.graph.nodes]
        below = {child for node in entries for child in children[node]}
        tops = left - below
        for component in components(children, left):
            if len(component) > 1 or component[0] in children[component[0]]:
                tops |= left.intersection(component)
        return left & reach(self.graph, tops)

    def _leave(self, staying: Set[int]) -> None:
        """Have these of the nodes that wait for the collector stay: in a root of their own, which no step removes."""
        roots = tuple(
            replace(root, nodes=tuple(node for node in root.nodes if node not in staying)) if root.kind == "garbage" else root
            for root in self.graph.roots
        )
        rest = Root(kind="garbage", label=COLLECTED, nodes=tuple(sorted(staying)))
        self.facts = replace(self.facts, graph=replace(self.graph, roots=(*roots, rest)))

    def left(self) -> Facts:
        """Return the facts after the steps so far."""
        return replace(self.facts, graph=without(self.graph, self.gone, self.cut))

    def settle(self) -> Settled:
        """Return the plan, where each storage is freed by the step that removes the last way to it."""
        graph, cut = self.graph, set(self.cut)
        left = [root for number, root in enumerate(graph.roots) if number not in self.gone]
        alive = reach(graph, (node for root in left for node in root.nodes), cut)
        kept, staying = frozenset(alive), storages_of(graph, alive)
        freed: set[int] = set()
        actions: list[Action] = []
        for step in reversed(self.steps):
            cut -= step.cut
            starts = [node for root in step.gone for node in graph.roots[root].nodes]
            starts += [child for parent, child in step.cut if parent in alive]
            again = reach(graph, starts, cut, blocked=alive)
            alive |= again
            back = storages_of(graph, again) - staying - freed
            freed |= back
            own = step.action.nbytes
            action = step.action if own is None else replace(step.action, nbytes=own + nbytes_of(graph, back))
            if action.nbytes == 0 and action.kind in _WITH_MEMORY:
                below = storages_of(graph, reach(graph, {*starts, *(child for _, child in step.cut)}, cut))
                action = replace(action, detail=joined("; ", filter(None, (_why_nothing(below, freed), action.detail))))
            actions.append(action)
        goes = alive - kept
        at_least = graph.rest is not None and any(
            node == graph.rest or graph.rest in graph.nodes[node].children for node in goes
        )
        return Settled(tuple(reversed(actions)), frozenset(freed), kept, at_least)


def _why_nothing(below: Set[int], freed: Set[int]) -> str:
    """Return why a step that leads to the storages `below` frees none of them, where later steps free `freed`."""
    if not below:
        return "leads to no memory"
    return "a later step frees its memory" if below & freed else "something else keeps its memory"


# --- Leftovers that an interrupted fit left on a Learner that is kept and idle, such as the batch, the prediction, the graph.


_LOSS = 1024
"""Least bytes of harmless leftovers that are mentioned; a fit that ended well leaves them, too (the bare number of the loss,
bars over a loader still in use)."""


def clear_leftovers(builder: PlanBuilder, only: Collection[int] | None = None) -> None:
    """Drop the leftovers of idle Learners, of those among the nodes `only` if these are given.

    A Learner that only an exception of the user's leads to stays as the exception left it.
    """
    graph = builder.graph
    live = builder.live(blocked={n for n, node in enumerate(graph.nodes) if node.kind in ("frame", "traceback")})
    wanted = live if only is None else live & set(only)
    idle = [fact for fact in builder.facts.learners if fact.node in wanted and not fact.is_running and fact.leftovers]
    cuts = [{edge for name in fact.leftovers for edge in _attribute_edges(graph, fact.node, name)} for fact in idle]
    for fact, cut, is_worth_it in _worth(builder, idle, cuts):
        if cut and is_worth_it:
            what = f"{fact.summary}: {', '.join(fact.leftovers)} of its last batch"
            builder.add(
                Action(
                    kind="leftovers",
                    subject=what,
                    participle="cleared",
                    nbytes=0,
                    refs=(graph.nodes[fact.node].ref,),
                    names=fact.leftovers,
                ),
                cut=cut,
            )


def _worth(
    builder: PlanBuilder, idle: list[LearnerFact], cuts: list[set[Edge]]
) -> Iterator[tuple[LearnerFact, set[Edge], bool]]:
    """Yield each Learner with its references, and whether they are mentioned, given that those before it go.

    All are examined in one pass: without any of these references, and with a bit for each of them, where does it lead?
    """
    graph = builder.graph
    edges = {edge: number for number, edge in enumerate(sorted({edge for cut in cuts for edge in cut}), start=1)}
    left = [node for number, root in enumerate(graph.roots) if number not in builder.gone for node in root.nodes]
    owners = owners_of_nodes(graph, [left, *([child] for _, child in edges)], builder.cut | edges.keys()) if edges else []
    behind: dict[int, dict[int, int]] = {}
    for storage, mask in enumerate(owners_of_storages(graph, owners) if edges else ()):
        if mask and not mask & 1:
            for bit in bits_of(mask):
                behind.setdefault(bit, {}).setdefault(mask, 0)
                behind[bit][mask] += graph.storages[storage].nbytes
    gone = 0
    for fact, cut in zip(idle, cuts, strict=True):
        own = sum(1 << edges[edge] for edge in cut)
        behind_cut = {mask: nbytes for edge in cut for mask, nbytes in behind.get(edges[edge], {}).items()}
        freed = sum(nbytes for mask, nbytes in behind_cut.items() if mask & ~gone and not mask & ~(gone | own))
        is_worth_it = freed >= _LOSS or not harmless_leftovers().issuperset(fact.leftovers)
        gone |= own if is_worth_it else 0
        yield fact, cut, is_worth_it


def _attribute_edges(graph: Graph, owner: int, name: str) -> set[Edge]:
    """Return the references that go when the attribute `name` of the node `owner` (`xb`, `progress.pbar`) is removed."""
    first, _, rest = name.partition(".")
    places = {owner, *(child for child, label in graph.nodes[owner].references if not label)}
    edges = {(place, child) for place in places for child, label in graph.nodes[place].references if label == f".{first}"}
    return {edge for _, child in edges for edge in _attribute_edges(graph, child, rest)} if rest else edges
