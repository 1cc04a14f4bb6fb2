"""The builder of a cleanup plan: steps that take references out of a graph, and the nodes still reached without them.

The bytes of each step are known once all steps are: the nodes left at the end are walked once, then the steps are undone from
the last to the first, and a step frees the storages that undoing it reaches again. One pass, however many steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from nbguard.cleanup.plan.plan import Action
from nbguard.memory.facts import Facts, Graph
from nbguard.memory.references.graph import STALE_KINDS, Edge, nbytes_of, reach, storages_of


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
    at_least: bool  # what goes leads to the rest that was not looked into


@dataclass(kw_only=True)
class PlanBuilder:
    """A cleanup plan so far."""

    facts: Facts  # the scan that it is made for
    left_out: Collection[str] = ()  # subjects of steps that are not to be taken
    gone: set[int] = field(default_factory=set)  # numbers of the roots that the steps remove
    cut: set[Edge] = field(default_factory=set)  # references that the steps remove
    steps: list[PlannedStep] = field(default_factory=list)  # in the order in which they will run
    skipped: list[str] = field(default_factory=list)  # sentences on what was asked for and will not be done

    @property
    def graph(self) -> Graph:
        """Return the graph that the plan is made for."""
        return self.facts.graph

    def add(self, action: Action, gone: Iterable[int] = (), cut: Iterable[Edge] = ()) -> None:
        """Append a step, unless it is to be left out.

        The bytes that it frees in the graph are added to its `nbytes`; None stays: not known beforehand.
        """
        if action.subject in self.left_out:
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

    def settle(self) -> Settled:
        """Return the plan: each storage is freed by the step after which nothing reaches it."""
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
            actions.append(step.action if own is None else replace(step.action, nbytes=own + nbytes_of(graph, back)))
        goes = alive - kept
        at_least = graph.rest is not None and any(
            node == graph.rest or graph.rest in graph.nodes[node].children for node in goes
        )
        return Settled(tuple(reversed(actions)), frozenset(freed), kept, at_least)
