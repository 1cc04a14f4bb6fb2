"""The partners of a target, the other keepers of its memory, whether they can go with it, and targets that stay.

One rule for every command that names a partner: it takes nothing that a live name needs for another reason. A list, a dict or a
second name may let go of the target; a model that has it as a part, a function that uses it and code that runs may not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from nbguard.memory.core.advice import NONE, Advice, is_python, release_names
from nbguard.memory.core.facts import EXPERIMENT_KINDS, Graph, NodeKind, Root, Target
from nbguard.memory.core.references.graph import GRAPH, Edge, leading_to, nbytes_of, path_text, reach, storages_of
from nbguard.memory.core.references.owner_sets import bits_of, owners_of_nodes, owners_of_storages
from nbguard.memory.core.references.releases import cached_edges, can_delete, is_function_cache
from nbguard.memory.core.references.shown_paths import way_without

How = Literal["same", "shares", "graph", "cache", "needs", "runs", "holds"]
"""How a partner keeps memory: it is the same object; it shares the memory; its autograd graph does; it is a function whose
cache does; it is an experiment or a function with the memory as a part; it is code that runs; it is a library or another root
that has no name."""

_NEEDING = frozenset({"learner", "model", "code"})
"""Kinds of objects that need their contents and are broken without them."""
_LOCKED = frozenset({"frame", "traceback", "locals"})
_LETTING_GO = frozenset({"error", "cache", "garbage"})
"""Kinds of roots that let go by themselves of the things that a cleanup's targets lead to."""
_WAYS = 20
"""Most places of one root that a command names one by one."""
_MANY = 3
"""A list or the like of more things than these, which has nothing else, is named as a whole."""
_COLLECTIONS = frozenset({"list", "tuple", "set", "deque"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """A place that keeps a target's memory alive."""

    path: str  # as one would write it
    how: How
    kind: NodeKind  # of the object there
    target: Target | None  # the target that a cleanup would be told to delete; None if it must not go

    @property
    def may_let_go(self) -> bool:
        """Return whether it can let go of the memory: it is deleted, or its cache is emptied."""
        return self.target is not None or self.how == "cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """All places that keep a target's memory alive."""

    all: tuple[Partner, ...]
    releasable: tuple[Partner, ...]  # after these, and the target, some of its memory is free; none where nothing frees any


def partners_of(graph: Graph, target: Target, entries: Collection[int], gone: Set[int], cut: Set[Edge]) -> Partners:
    """Return the keepers of `target`, which refers to `entries`, without the roots `gone` and references `cut`."""
    return _Search(graph=graph, target=target, entries=frozenset(entries), gone=gone, cut=cut).partners()


@dataclass(frozen=True, kw_only=True)
class _Search:
    graph: Graph
    target: Target
    entries: frozenset[int]
    gone: Set[int]  # numbers of roots that go anyway
    cut: Set[Edge]  # references that go anyway

    @cached_property
    def own(self) -> set[int]:
        """Return the nodes that the target leads to."""
        return reach(self.graph, self.entries, self.cut)

    @cached_property
    def left(self) -> frozenset[Edge]:
        """Return the references that are gone once the target is, too."""
        graph = self.graph
        parents = {number for number, node in enumerate(graph.nodes) if node.ref in self.target.containers}
        return frozenset(self.cut) | {(parent, child) for parent in parents for child in self.entries}

    def partners(self) -> Partners:
        graph = self.graph
        storages = storages_of(graph, self.own)
        groups = [() if self._is_gone(n, root) else root.nodes for n, root in enumerate(graph.roots)]
        keeping = owners_of_storages(graph, owners_of_nodes(graph, groups, self.left))
        roots = {number for storage in storages for number in bits_of(keeping[storage])}
        found = {number: tuple(self._ways(graph.roots[number], storages)) for number in sorted(roots)}
        stuck = sum(1 << number for number, ways in found.items() if not all(way.may_let_go for way in ways))
        free = {storage for storage in storages if not keeping[storage] & stuck}
        freeing = {number for storage in free for number in bits_of(keeping[storage])}
        releasable = (way for number in sorted(freeing) for way in self._ways(graph.roots[number], free))
        return Partners(all=_once(way for ways in found.values() for way in ways), releasable=_once(releasable))

    def _is_gone(self, number: int, root: Root) -> bool:
        is_own = root.label == self.target.root and root.kind in ("name", "out")
        return number in self.gone or is_own or root.kind in _LETTING_GO

    def _ways(self, root: Root, storages: Set[int]) -> Iterator[Partner]:
        """Yield each place to let go of, until the root leads to none of `storages` any more."""
        graph, cut = self.graph, set(self.left)
        carriers = {n for n, node in enumerate(graph.nodes) if not storages.isdisjoint(node.storages)}
        goals = self.entries & carriers or self.entries
        is_whole = root.kind == "name" and self._is_all_of(root, carriers)
        for number in range(_WAYS + 1):
            way = way_without(graph, root, goals, cut) or way_without(graph, root, carriers, cut)
            if not way:
                return
            if (at := self._cache(way)) is not None and number < _WAYS:
                path = path_text(graph, root, way[: at + 1], shorten=6)
                yield Partner(path=path, how="cache", kind=graph.nodes[way[-1]].kind, target=None)
                cut |= cached_edges(graph, way[at])
                continue
            place = 0 if is_whole else self._place(root, way)
            partner = self._partner(root, way, place)
            yield replace(partner, target=None) if number == _WAYS else partner
            if not place or partner.target is None:
                return
            cut.add((way[place - 1], way[place]))

    def _cache(self, way: tuple[int, ...]) -> int | None:
        """Return the place of the first function on a way whose cache leads on, or None if there is none."""
        graph, steps = self.graph, enumerate(pairwise(way))
        return next(
            (n for n, step in steps if is_function_cache(graph, step[0]) and step in cached_edges(graph, step[0])), None
        )

    def _is_all_of(self, root: Root, carriers: Set[int]) -> bool:
        """Say whether a root is a list or the like of many things that all lead to the memory and is named as a whole."""
        entry = self.graph.nodes[root.nodes[0]]
        if entry.type_name not in _COLLECTIONS or len(entry.children) <= _MANY:
            return False
        return leading_to(self.graph, carriers, self.left).issuperset(entry.children)

    def _place(self, root: Root, way: tuple[int, ...]) -> int:
        """Return the place on a way where least is lost: before an experiment, or the thing itself; 0 is the root."""
        graph = self.graph
        place = next((n for n, node in enumerate(way) if graph.nodes[node].kind in EXPERIMENT_KINDS), len(way) - 1)
        while place and not can_delete(graph, root, way[: place + 1]):
            place -= 1
        return place

    def _partner(self, root: Root, way: tuple[int, ...], place: int) -> Partner:
        graph = self.graph
        path = path_text(graph, root, way[: place + 1], shorten=6)
        how: How = "graph" if GRAPH in _labels(graph, way) else "shares"
        target: Target | None = None
        at = next((n for n, node in enumerate(way) if self._needs(node)), None)
        text = path_text(graph, root, way)
        if way[-1] in self.entries and is_python(text) and text != self.target.text:
            how, path = "same", text
        if root.kind == "frame" or any(graph.nodes[node].kind in _LOCKED for node in way):
            how, path = "runs", root.label
        elif at is not None:
            how, path = "needs", path_text(graph, root, way[: at + 1], shorten=6)
        elif root.kind not in ("name", "out"):
            how = "holds"
        elif place and root.kind == "name":
            text = path_text(graph, root, way[: place + 1])
            target = Target(text=text, containers=(graph.nodes[way[place - 1]].ref,), value=graph.nodes[way[place]].ref)
        else:
            target = Target(text=root.label, root=root.label)
        return Partner(path=path, how=how, kind=graph.nodes[way[-1]].kind, target=target)

    def _needs(self, node: int) -> bool:
        """Say whether an object on a way is broken without the target: a model, a function, and of a tensor an optimizer."""
        kind = self.graph.nodes[node].kind
        is_for_model = any(self.graph.nodes[n].kind in ("learner", "model") for n in self.own)
        return node not in self.own and (kind in _NEEDING or (kind == "optimizer" and not is_for_model))


def _labels(graph: Graph, way: tuple[int, ...]) -> set[str]:
    return {label for parent, child in pairwise(way) for node, label in graph.nodes[parent].references if node == child}


def _once(partners: Iterable[Partner]) -> tuple[Partner, ...]:
    return tuple({(partner.path, partner.target): partner for partner in partners}.values())


# --- Targets of a cleanup that stay because something else keeps their memory, with the command that would free it.


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
            advice=_release(state, storages, state.going, targets, state.freed, asked=target, has_caches=has_caches),
            instead=_release(state, storages, (), (*also, *targets), frozenset(), asked=target, has_caches=has_caches),
        )


def _release(
    state: CleanupState,
    storages: Set[int],
    going: Targets,
    targets: Targets,
    free: Set[int],
    *,
    asked: Target,
    has_caches: bool,
) -> Advice:
    """Return the command that releases `targets` once `going` are gone, and `free` is free; none where it frees no `storages`.

    Displayed results that go with the other targets need not be named, nor parts that go with their wholes, but for `asked`.
    """
    freed = state.freed_by((*going, *targets), has_caches) - free
    if not freed & storages:
        return NONE
    for is_idle in (_is_displayed, _is_part_of_one):
        fewer = tuple(each for each in targets if each == asked or not is_idle(each, targets))
        if len(fewer) < len(targets) and state.freed_by((*going, *fewer), has_caches) - free == freed:
            targets = fewer
    return release_names([each.text for each in targets], nbytes_of(state.graph, freed), has_caches=has_caches)


def _is_displayed(target: Target, _: Targets) -> bool:
    return target.root.startswith("Out[")


def _is_part_of_one(target: Target, targets: Targets) -> bool:
    return not target.root and any(each.root and target.text.startswith((f"{each.root}.", f"{each.root}[")) for each in targets)
