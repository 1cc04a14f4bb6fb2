"""Objects of a set that are held from outside of it: by the collector's own rule, with the references of C++ counted in."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from nbguard.scan.heap.walk import Walk, references_by_asking

_UNCOUNTED = "graph"  # C++ owns the nodes of graphs: their counts say nothing
_HOLDS_IN_CPP = ("tensor", "graph")
_OF_AN_ERROR = ("frame", "traceback")  # many places hold these; a cleanup leaves them where they are


def held_outside(walk: Walk, first: int) -> list[int]:
    """Return the objects from `first` on that have more references than the set itself accounts for."""
    inside = [0] * (len(walk.objects) - first)
    in_cpp: Counter[int] = Counter()
    for parent in range(first, len(walk.objects)):
        for child in walk.children[parent]:
            if child >= first:
                inside[child - first] += 1
        if parent in walk.only_stale and walk.kind[parent] == "array":
            for element in _elements(walk, parent):
                inside[element - first] += element >= first
        if walk.kind[parent] in _HOLDS_IN_CPP:
            shown = {id(ref) for ref in gc.get_referents(walk.objects[parent])}
            in_cpp.update(child for child in walk.children[parent] if id(walk.objects[child]) not in shown)
    ours = references_by_asking()
    objects = walk.objects
    of_an_error = {n for n in walk.only_stale if walk.kind[n] in _OF_AN_ERROR}
    held = []
    for n in range(first, len(objects)):
        from_roots = walk.entries.get(n, 0)
        if walk.kind[n] == _UNCOUNTED or from_roots is None or n in of_an_error:
            continue
        extra = sys.getrefcount(objects[n]) - ours - inside[n - first] - from_roots
        if walk.kind[n] == "tensor" and walk.referents.autograd is not None:
            references = walk.referents.autograd.cpp_references(objects[n])
            extra -= references > 0  # C++ keeps the Python object, too
            if references > in_cpp[n]:  # by more than the graphs, gradients and views that were found: a cache, a library
                extra += 1
        if extra > 0:
            held.append(n)
    matters = walk.leading_to((n for n in range(first, len(objects)) if is_goal(walk, n)), first, of_an_error)
    return [n for n in held if n in matters]  # a `print` or a lock that everybody holds explains nothing


def _elements(walk: Walk, array: int) -> Iterator[int]:
    """Yield what an object array has, once for each reference: the walk has it by lists that were made for it.

    Of what no root leads to these count as references from outside: the collector does not see them either.
    """
    numpy: Any = sys.modules["numpy"]
    holders = [array]
    for _ in range(numpy.ndarray.__dict__["ndim"].__get__(walk.objects[array])):
        holders = [child for at in holders for child in walk.children[at] if type(walk.objects[child]) is list]
    for holder in holders:
        yield from walk.children[holder]


def below(walk: Walk, first: int, tops: Iterable[int]) -> set[int]:
    """Return the objects from number `first` on that `tops` lead to, these included."""
    reached = {n for n in tops if n >= first}
    todo = list(reached)
    while todo:
        for child in walk.children[todo.pop()]:
            if child >= first and child not in reached:
                reached.add(child)
                todo.append(child)
    return reached


def points_below(walk: Walk, first: int, tops: list[int]) -> set[int]:
    """Return the objects below `tops` that need an explanation."""
    return {n for n in below(walk, first, tops) if _is_point(walk, n)}


def _is_point(walk: Walk, number: int) -> bool:
    """Say whether the holder of an object must be named: the object matters, or a cleanup would release it."""
    return number in walk.only_stale or is_goal(walk, number)


def is_goal(walk: Walk, number: int) -> bool:
    """Say whether an object matters by itself: it holds a storage or a pool, or is a Learner."""
    return number in walk.holds or walk.kind[number] in ("learner", "pool")
