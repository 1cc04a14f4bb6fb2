"""Objects that are held from outside of a set, and the objects that hold them."""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Set
from functools import cache
from itertools import islice
from typing import Any

from nbguard.memory.core.references.graph import upwards
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.heap.kinds import FRAMES, never_asked
from nbguard.memory.scan.heap.referents import has_values_of_an_object
from nbguard.memory.scan.heap.walk import Walk, made_for_array, references_by_asking
from nbguard.memory.scan.roots.frames import LiveRoot

# --- The objects that refer to others, by passes over the whole heap: each shows as many steps upwards as it can


_MOST_PASSES = 24
_FEWEST_PASSES = 4
"""Passes that are made however large the heap is."""
_MOST_OBJECTS = 12_000_000
"""Objects that the passes together may go over: a data set in lists has millions."""
_MOST_FOLLOWED = 500
"""Holders whose own holders are looked for before anybody asks for them."""
_CHUNK = 512
_FEW = 8  # objects up to which gc.get_referrers is faster than our own pass, though it compares all with all


class Holders:
    """The holders of a walk's objects. Those found before anybody asked for them are kept until the walk has them, too.

    The holders of an object at one of the ids `ends` are looked for only where they are asked for.
    """

    def __init__(self, walk: Walk, ends: Iterable[int]) -> None:
        self._walk = walk
        self._ends = set(ends)
        self._found: dict[int, Any] = {}
        self._in_walk: dict[int, None] = {}
        self._known = set[int]()  # ids of objects all of whose holders have been found
        self._passes = 0

    def find(self, ids: Iterable[int]) -> bool:
        """Find the holders of the walk's objects with these ids; False if the heap is too large for as many passes."""
        asked = [self._walk.objects[self._walk.number[key]] for key in ids if key not in self._known]
        if not asked:
            return True
        objects = gc.get_objects()
        left = max(_FEWEST_PASSES, min(_MOST_PASSES, _MOST_OBJECTS // len(objects))) - self._passes
        if left <= 0:
            return False
        own = {id(obj) for obj in (asked, objects, self._found, self._walk.objects)}
        found, followed, unused = _upwards(objects, asked, self._ends | self._walk.number.keys() | own, left)
        self._passes += left - unused
        self._known.update(map(id, asked), map(id, followed))
        self._found |= {id(obj): obj for obj in found if id(obj) not in own}
        self.let_go()
        return True

    def __iter__(self) -> Iterator[Any]:
        """Yield all that was found, including the objects that the walk has."""
        yield from (self._walk.objects[self._walk.number[key]] for key in self._in_walk)
        yield from list(self._found.values())

    def callers(self, new: int) -> list[Any]:
        """Return the frames and tracebacks found that hold one of the walk's from number `new` on, all the way up.

        Chains of dozens are usual: a finished frame is held by the frames it called (`f_back`), as long as any traceback
        keeps one of them.
        """
        met = [obj for obj in self._walk.objects[new:] if type(obj) in FRAMES]
        return _frames_above(met, [obj for obj in self._found.values() if type(obj) in FRAMES])

    def let_go(self) -> None:
        """Refer to nothing that the walk has: its references are counted."""
        for key in [key for key in self._found if key in self._walk.number]:
            del self._found[key]
            self._in_walk[key] = None

    def clear(self) -> None:
        """Forget all holders."""
        self._found.clear()
        self._in_walk.clear()


def referrers_of(asked: list[Any]) -> list[Any]:
    """Return the tracked objects that refer to any of `asked`, by one pass."""
    found, _, _ = _upwards(gc.get_objects(), asked, set(), 1)
    return [obj for obj in found if obj is not asked]


def _upwards(objects: list[Any], asked: list[Any], ends: set[int], passes: int) -> tuple[list[Any], list[Any], int]:
    """Return the holders of `asked` and theirs in turn, the ones that were followed, and the number of passes left.

    A class is not followed, nor an object with one of the ids `ends`.
    """
    if native.compiled is None:
        return _upwards_by_python(objects, asked, ends, passes)
    found, followed, left = native.compiled.referrers(objects, asked, ends, passes, _MOST_FOLLOWED)
    return [obj for obj in found if obj is not never_asked()], followed, left


def _upwards_by_python(objects: list[Any], asked: list[Any], ends: set[int], passes: int) -> tuple[list[Any], list[Any], int]:
    """Do as the compiled part does, a step with each pass; frames go all the way up at once."""
    found: dict[int, Any] = {}
    followed: list[Any] = []
    own = {id(obj) for obj in (asked, objects, found, followed, sys._getframe(), never_asked())}
    new, ends = asked, ends.union(map(id, asked))
    while new and passes > 0:
        passes -= 1
        own.add(id(new))
        holders = [obj for obj in _referrers(objects, new) if id(obj) not in own and id(obj) not in found]
        own.add(id(holders))  # the next step meets it
        if any(type(obj) in FRAMES for obj in holders):
            kinds = set(map(id, FRAMES))  # a question to `FRAMES` for each object of the heap takes five times as long
            holders += _frames_above(holders, [obj for obj in objects if id(type(obj)) in kinds])
        found |= {id(obj): obj for obj in holders}
        may_go_on = (obj for obj in holders if id(obj) not in ends and not issubclass(type(obj), type))
        new = list(islice(may_go_on, _MOST_FOLLOWED - len(followed))) if passes else []
        followed += new
    return [obj for obj in objects if id(obj) in found], followed, passes


def _referrers(objects: list[Any], asked: list[Any]) -> list[Any]:
    if len(asked) <= _FEW:
        few = tuple(asked)  # a list would be copied: since 3.13 the copy is found
        return [obj for obj in gc.get_referrers(*few) if obj is not few]
    ids, found = set(map(id, asked)), list[Any]()
    for at in range(0, len(objects), _CHUNK):
        chunk = [obj for obj in objects[at : at + _CHUNK] if obj is not never_asked()]
        if not ids.isdisjoint(map(id, gc.get_referents(*chunk))):
            found += [obj for obj in chunk if not ids.isdisjoint(map(id, gc.get_referents(obj)))]
    return found


def _frames_above(met: list[Any], frames: list[Any]) -> list[Any]:
    """Return the frames and tracebacks among `frames` that hold any of `met`, in however many steps."""
    above: dict[int, list[Any]] = {}
    for obj in frames:
        for ref in gc.get_referents(obj):
            if type(ref) in FRAMES:
                above.setdefault(id(ref), []).append(obj)
    known = set(map(id, met))
    found: list[Any] = []
    todo = [id(obj) for obj in met if type(obj) in FRAMES]
    while todo:
        for obj in above.get(todo.pop(), ()):
            if id(obj) not in known:
                known.add(id(obj))
                found.append(obj)
                todo.append(id(obj))
    return found


# --- region


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


# --- Dicts of hooks that C++ keeps for autograd graphs and tensors, so that Python shows no holder
#
# A hook on the result of an operation, on a node, or of a module's whole backward pass belongs to a node in C++. PyTorch has no
# way from the node to its hooks. As one of the graphs has them, they count as held until the last graph goes which may be it.
#
# A hook whose function leads back to a graph, or to a tensor with a hook, closes a cycle through C++ that nothing frees.


_MOST = 5_000
"""Objects behind a hook that are looked through."""


def dicts_of_hooks(walk: Walk, held: list[int]) -> set[int]:
    """Return the objects among `held` that are dicts as PyTorch makes them for hooks, keyed by the numbers of their handles."""
    found = {n: walk.objects[n] for n in held if type(walk.objects[n]) is OrderedDict}
    return {n for n, hooks in found.items() if hooks and all(type(key) is int for key in hooks)}


def lead_to_hooks(walk: Walk, hooks: Set[int], first: int) -> set[int]:
    """Have the walk's graphs lead to dicts of hooks without a known holder, and return those dicts.

    Dicts that lead back to a graph or tensor in use, an object with a number below `first`, are left, as no name frees them.
    """
    if not hooks or walk.rest is not None:
        return set()
    owners: dict[int, int] = {}
    last = []
    for n, (kind, children) in enumerate(zip(walk.kind, walk.children, strict=True)):
        if kind == "tensor":
            owners.update((child, n) for child in children if child in hooks)
        elif kind == "graph" and not any(walk.kind[child] == "graph" for child in children):
            last.append(n)  # each node of a graph leads to such a one
    ends = {*last, *owners.values()}
    leading = walk.leading_to(ends)
    own = {n: _ends_behind(walk, n, ends, leading) for n in hooks}
    found = {n for n in hooks if (last or n in owners) and all(end >= first for end in own[n])}
    for n in sorted(found):
        of_tensor = [child for child in walk.children[owners[n]] if walk.kind[child] == "graph"] if n in owners else last
        for node in of_tensor:
            if not own[n] or node in own[n]:
                walk.children[node].append(n)
    return found


def _ends_behind(walk: Walk, hooks: int, ends: Set[int], leading: Set[int]) -> set[int]:
    """Return the `ends` that a dict of hooks leads to, also through objects that are not in the walk, or not whole."""
    found, seen, todo = set[int](), {id(walk.objects[hooks])}, [walk.objects[hooks]]
    while todo and len(seen) < _MOST:
        for ref in gc.get_referents(todo.pop()):
            number = walk.number.get(id(ref), -1)
            if number >= 0 and number not in walk.unwalked:
                found |= below(walk, 0, [number]) & ends if number in leading else set()
            elif (
                id(ref) not in seen and id(ref) not in walk.stop and gc.is_tracked(ref) and walk.kinds.of(type(ref)) != "class"
            ):
                seen.add(id(ref))
                todo.append(ref)
    return found
