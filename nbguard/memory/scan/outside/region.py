"""Objects that are held from outside of a set, by the collector's own rule, with the references of C++ counted in."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set
from functools import cache

from nbguard.memory.core.references.graph import upwards
from nbguard.memory.scan.heap.kinds import FRAMES
from nbguard.memory.scan.heap.referents import has_values_of_an_object
from nbguard.memory.scan.heap.walk import Walk, made_for_array, references_by_asking
from nbguard.memory.scan.roots.frames import LiveRoot

_UNCOUNTED = ("graph", "class")  # C++ owns the nodes of graphs, and a class its descriptors: their counts say nothing
_IN_NUMPY = ("array", "part of an array")  # numpy's iterators, and tensors made of arrays, refer to them in C
_HOLDS_IN_CPP = ("tensor", "graph", "script")
_OF_AN_ERROR = ("frame", "traceback")  # many places hold these; a cleanup leaves them where they are


Rooted = tuple[LiveRoot, list[int]]
"""A root, and the numbers of its objects in the walk."""


class Region:
    """Objects of a walk whose holders are looked for: those that matter, and those added to the walk as their holders.

    Either those that only stale roots or none lead to, or (`named`) those that the user's own roots lead to.
    """

    def __init__(self, walk: Walk, *, named: bool) -> None:
        self.walk = walk
        self.first: int = 0 if named else walk.only_stale.start
        """Least number of an object that may refer to its own."""

        self._stop = walk.only_stale.start if named else len(walk.objects)
        self._added = len(walk.objects)
        self.known: int = self._added if named else self.first
        """Number below which an object is in use itself: its own holders are not looked for."""

        if named:
            maybe = (n for n in range(self._stop) if walk.kind[n] in _OF_AN_ERROR)  # not the exception itself
            self._frames = {n for n in maybe if type(walk.objects[n]) in FRAMES}
        else:
            self._frames = {n for n in walk.only_stale if walk.kind[n] in _OF_AN_ERROR}
        goals = {n for n in range(self.first, self._added) if is_goal(walk, n)}
        self._ways_in: set[int] = set() if named else self._leading_to_names() - goals
        goals |= self._ways_in
        self._leading = walk.leading_to(goals, self.first)
        blocked = () if named else self._frames
        self._wanted = self._leading if named else walk.leading_to(goals, self.first, blocked)
        self._blocked: Collection[int] = blocked

    def _leading_to_names(self) -> set[int]:
        """Return the objects that refer to memory of the user's names: a model of a library whose parameters a graph has."""
        walk = self.walk
        referring = [n for n in range(walk.only_stale.stop, self._added) if any(c < self.first for c in walk.children[n])]
        if not referring:
            return set()
        of_names = walk.leading_to(n for n in range(self.first) if is_goal(walk, n))
        return {n for n in referring if any(child < self.first and child in of_names for child in walk.children[n])}

    def extend(self) -> None:
        """Take in objects newly added to the walk that lead to something of the region."""
        self._leading = self.walk.leading_to(self._leading, self._added)
        self._wanted = self.walk.leading_to(self._wanted, self._added, self._blocked)

    def take_in(self, number: int) -> None:
        """Have the references of an object count, as it leads to something of the region."""
        self._leading.add(number)

    def held(self) -> list[int]:
        """Return the objects that have more references than the walk accounts for."""
        walk, objects = self.walk, self.walk.objects
        inside, in_cpp = self._references()
        ours = references_by_asking()
        held = []
        for n in sorted(self._wanted):
            from_roots = walk.entries.get(n, 0)
            if not (self.first <= n < self._stop or n >= self._added) or n in self._frames:
                continue
            if walk.kind[n] in _UNCOUNTED or from_roots is None or (n < self.known and walk.kind[n] in _IN_NUMPY):
                continue
            extra = sys.getrefcount(objects[n]) - ours - inside[n] - from_roots
            extra -= has_values_of_an_object(objects[n])  # the owner has its dict out of the collector's sight
            if walk.kind[n] == "tensor" and walk.referents.autograd is not None:
                references = walk.referents.autograd.cpp_references(objects[n])
                # C++'s own references are not Python's; an object that a saved tensor's hooks packed is held like any other
                extra += min(in_cpp[n], references) - (references_of_cpp() if references > 0 else 0)
                # by more than the graphs, gradients and views that were found: a cache, a library
                if references > in_cpp[n] and walk.referents.autograd.reads_changed:
                    extra += 1
            if extra > 0:
                held.append(n)
        return held

    def _references(self) -> tuple[Counter[int], Counter[int]]:
        """Return how often the walk's objects refer to each that matters: all references, and those that are C++'s own."""
        walk = self.walk
        inside, in_cpp = Counter[int](), Counter[int]()
        for parent in self._leading:
            children = walk.children[parent]
            if has_values_of_an_object(walk.objects[parent]):
                continue  # the owner refers to them
            inside.update(children)
            if walk.kind[parent] == "array" and parent < walk.only_stale.stop:
                inside.update(_elements(walk, parent))
            if walk.kind[parent] in _HOLDS_IN_CPP:
                shown = {id(ref) for ref in gc.get_referents(walk.objects[parent])}
                in_cpp.update(child for child in children if id(walk.objects[child]) not in shown)
        return inside, in_cpp

    def points(self, tops: Iterable[int]) -> set[int]:
        """Return the objects below `tops` whose holder must be named: they matter, or a cleanup would release them."""
        return self._points_among(below(self.walk, self.first, tops, self._leading))

    def _points_among(self, reached: Set[int]) -> set[int]:
        return {n for n in reached if n in self.walk.only_stale or n in self._ways_in or is_goal(self.walk, n)}

    def pointing(self, tops: Iterable[int], named: Set[int], in_use: Set[int] = frozenset()) -> set[int]:
        """Return those of `tops` that lead to points not `in_use` past the `named` objects: in one pass, however many they are.

        An object that leads to a point through a named one alone lets go of it with that one, as child loggers do where
        the root logger has a model. One that leads to it another way keeps it, and must be named, too.
        """
        tops = set(tops) - named
        reached = below(self.walk, self.first, tops, self._leading, named)
        parents: dict[int, list[int]] = {}
        for parent in reached:
            for child in self.walk.children[parent]:
                if child in reached:
                    parents.setdefault(child, []).append(parent)
        return tops & upwards(parents, self._points_among(reached) - in_use)


def _elements(walk: Walk, array: int) -> Iterator[int]:
    """Yield the elements of an object array, once for each reference: the walk has it by lists that were made for it.

    For objects that no root leads to these count as references from outside: the collector does not see them either.
    """
    for holder in made_for_array(walk, array)[-1]:
        yield from walk.children[holder]


def below(
    walk: Walk, first: int, tops: Iterable[int], within: Collection[int] | None = None, without: Collection[int] = ()
) -> set[int]:
    """Return the objects from number `first` on, of those `within` and not `without`, that `tops` lead to, these included."""
    reached = {n for n in tops if n >= first}
    todo = list(reached)
    while todo:
        for child in walk.children[todo.pop()]:
            if child >= first and child not in reached and (within is None or child in within) and child not in without:
                reached.add(child)
                todo.append(child)
    return reached


def is_goal(walk: Walk, number: int) -> bool:
    """Say whether an object matters by itself: it holds a storage or a pool, or is a Learner."""
    return number in walk.holds or walk.kind[number] in ("learner", "pool")


@cache
def references_of_cpp() -> int:
    """Return by how many references C++ keeps a tensor's Python object, 1 in PyTorch 2.13 and 0 in 2.8, however many it has.

    In 2.8 the Python object keeps the tensor instead.
    """
    tensor = sys.modules["torch"].empty(1, device="cpu")
    alone = sys.getrefcount(tensor)
    view = tensor.view(1)
    by_cpp = sys.getrefcount(tensor) - alone
    del view
    return by_cpp
