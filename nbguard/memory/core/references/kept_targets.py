"""Targets of a cleanup that stay because something else keeps their memory, with the command that would free it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass

from nbguard.memory.core.advice import NONE, Advice, release_names
from nbguard.memory.core.facts import Graph, NodeKind
from nbguard.memory.core.references.graph import Edge, nbytes_of, reach, storages_of
from nbguard.memory.core.references.partners import How, partners_of
from nbguard.memory.core.target import Target

Targets = tuple[Target, ...]
_NOUNS = {"tensor": "tensor", "model": "model", "learner": "Learner", "optimizer": "optimizer", "loader": "loader"}


@dataclass(frozen=True, slots=True)
class Keeper:
    """A place that keeps the memory of a target alive."""

    path: str  # as one would write it
    how: How  # the way it keeps it
    kind: NodeKind  # of the object that it keeps

    @property
    def words(self) -> str:
        """Return in words how it keeps a target's memory."""
        match self.how:
            case "same":
                return f"`{self.path}` is the same {_NOUNS.get(self.kind, 'object')}"
            case "shares":
                return f"`{self.path}` shares its memory"
            case "graph":
                return f"`{self.path}` keeps it"
            case "cache":
                return f"the cache of `{self.path}` keeps it"
            case "needs":
                return f"`{self.path}` needs it"
            case "runs":
                return f"code that runs uses it ({self.path})"
            case "holds":
                return f"{self.path} holds it"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTarget:
    """Targets that stay: deleting them would free nothing, since something else keeps the same memory."""

    names: tuple[str, ...]  # as the user wrote them
    nbytes: int  # bytes that they lead to
    keepers: tuple[Keeper, ...]  # the others that lead to these bytes
    advice: Advice = NONE  # frees them after the plan, with their keepers; no command where one of these needs the memory
    instead: Advice = NONE  # the same without the plan: names its other targets, too, where they lead to these bytes


@dataclass(frozen=True, kw_only=True)
class CleanupState:
    """The state of a graph after a plan."""

    graph: Graph
    gone: Set[int]  # numbers of the roots that go
    cut: Set[Edge]  # references that go
    freed: Set[int]  # numbers of the storages that are free afterwards
    going: Targets  # its targets that go
    freed_by: Callable[[Targets, bool], Set[int]]
    """The storages that a plan frees which has these targets instead, and may empty the caches of functions besides."""


def entries_of(graph: Graph, target: Target) -> set[int]:
    """Return the nodes that a target refers to; none where that is not known, or leads to nothing."""
    if target.root:
        return {node for root in graph.roots if root.label == target.root for node in root.nodes}
    return {number for number, node in enumerate(graph.nodes) if target.value and node.ref == target.value}


def kept_targets(state: CleanupState, idle: Collection[Target]) -> Iterator[KeptTarget]:
    """Yield the targets `idle`, which free nothing beside those that go; the ones that keep each other's memory together."""
    graph = state.graph
    told: set[str] = set()
    for target in idle:
        entries = entries_of(graph, target)
        storages = storages_of(graph, reach(graph, entries))
        if target.text in told or not storages:
            continue
        partners = partners_of(graph, target, entries, state.gone, state.cut)
        paths = {partner.path for partner in partners.all}
        told.add(target.text)
        names = (target.text, *(other.text for other in idle if other.text in paths and other.text not in told))
        told.update(names)
        releasable = {each.target.text: each.target for each in partners.releasable if each.target is not None}
        targets = tuple(({target.text: target} | releasable).values())
        has_caches = any(each.how == "cache" for each in partners.releasable)
        also = tuple(each for each in state.going if storages & storages_of(graph, reach(graph, entries_of(graph, each))))
        yield KeptTarget(
            names=names,
            nbytes=nbytes_of(graph, storages),
            keepers=tuple(Keeper(each.path, each.how, each.kind) for each in partners.all if each.path not in names),
            advice=_release(state, storages, state.going, targets, state.freed, has_caches=has_caches),
            instead=_release(state, storages, (), (*also, *targets), frozenset(), has_caches=has_caches),
        )


def _release(
    state: CleanupState, storages: Set[int], going: Targets, targets: Targets, free: Set[int], *, has_caches: bool
) -> Advice:
    """Return the command that releases `targets` once `going` are gone, and `free` is free; none where it frees no `storages`.

    Displayed results that go with the other targets need not be named.
    """
    freed = state.freed_by((*going, *targets), has_caches) - free
    without = tuple(target for target in targets if not target.root.startswith("Out["))
    if 0 < len(without) < len(targets) and state.freed_by((*going, *without), has_caches) - free == freed:
        targets = without
    if not freed & storages:
        return NONE
    return release_names([each.text for each in targets], nbytes_of(state.graph, freed), has_caches=has_caches)
