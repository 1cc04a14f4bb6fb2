"""Unreachable objects that the collector cannot free, since cycles that pass through C++ stay for ever.

gc sees the references that Python objects show it. References that torch and numpy keep in C++ (a graph, a gradient, the base
of a view) it takes for a holder outside, and leaves alone everything that holder leads to. If the holder goes with the rest,
the next pass frees that too. If it is itself part of the cycle, nothing ever will: a hook on a tensor that closes over the
tensor, `backward(create_graph=True)`, `base.view = base[:2]`.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection

from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.heap.walk import Walk, references_by_asking


def stuck_in_cpp(walk: Walk, garbage: Collection[int]) -> set[int]:
    """Return the objects of `garbage`, all unreachable, that no number of collections will free."""
    model = _Collector(walk, garbage)
    return model.run() if model.hidden else set()


class _Collector:
    """Python's collector and C++'s reference counts, played on the numbers of unreachable objects."""

    def __init__(self, walk: Walk, garbage: Collection[int]) -> None:
        self.left = set(garbage)
        self.cpp = {n for n in garbage if walk.kind[n] == "graph" and not _is_python_function(walk.objects[n])}
        self.children: dict[int, list[int]] = {}
        self.parents: dict[int, set[int]] = {}
        shown: Counter[int] = Counter()
        hidden: dict[int, set[int]] = {}
        for parent in garbage:
            below = [] if _is_ours_alone(walk, parent) else [child for child in walk.children[parent] if child in self.left]
            seen_by_gc = set() if parent in self.cpp else {id(ref) for ref in gc.get_referents(walk.objects[parent])}
            self.children[parent] = below
            for child in below:
                self.parents.setdefault(child, set()).add(parent)
                if id(walk.objects[child]) in seen_by_gc:
                    shown[child] += 1
                elif child in self.cpp or not _is_python_function(walk.objects[child]):
                    hidden.setdefault(child, set()).add(parent)
        more = {n for n in hidden if _has_more(walk, n, shown[n])}
        self.hidden = {n: above for n, above in hidden.items() if n in self.cpp or n in more}

    def run(self) -> set[int]:
        """Collect until nothing more goes; return the objects that are left."""
        while freed := self._one_pass():
            self.left -= freed
        return self.left

    def _one_pass(self) -> set[int]:
        """Return the objects that one collection frees: those that no C++ holder leads to, then those that they kept in C++."""
        kept = {n for n, above in self.hidden.items() if n in self.left and above & self.left} | (self.cpp & self.left)
        todo = list(kept)
        while todo:
            for child in self.children[todo.pop()]:
                if child in self.left and child not in kept:
                    kept.add(child)
                    todo.append(child)
        freed = self.left - kept
        todo = list(freed)
        while todo:
            for child in self.children[todo.pop()]:
                if child in self.left and child not in freed and not (self.parents[child] & self.left) - freed:
                    freed.add(child)
                    todo.append(child)
        return freed


def _is_python_function(obj: object) -> bool:
    """Say whether an object is the context of a `torch.autograd.Function`, whose and whose tensor's references gc sees."""
    return any(name_of(cls) == "_FunctionBase" for cls in mro_of(type(obj)))


def _has_more(walk: Walk, number: int, shown: int) -> bool:
    """Say whether an object has more references than those that gc sees."""
    return sys.getrefcount(walk.objects[number]) - references_by_asking() > shown or _is_held_by_cpp(walk, number)


def _is_ours_alone(walk: Walk, number: int) -> bool:
    """Say whether an object came into being by our looking: an output that its own graph saved is unpacked again each time."""
    is_ours = walk.kind[number] == "tensor" and sys.getrefcount(walk.objects[number]) == references_by_asking()
    return is_ours and not _is_held_by_cpp(walk, number)


def _is_held_by_cpp(walk: Walk, number: int) -> bool:
    """Say whether C++ refers to a tensor: PyTorch 2.13 counts that as a reference of its Python object, and 2.4 does not."""
    autograd = walk.referents.autograd
    return walk.kind[number] == "tensor" and autograd is not None and autograd.cpp_references(walk.objects[number]) > 0
