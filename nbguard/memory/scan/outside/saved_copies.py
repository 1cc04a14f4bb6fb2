"""Copies of results that autograd keeps in C++, where they are objects of Python's as well.

A node that saves its own result (`exp`, `softmax`) keeps a detached copy of the tensor, and unpacks another tensor on the same
storage whenever it is asked. Usually the copy never was an object. Under a dispatch mode (FLOP counters, `%gpumem simulate`)
Python makes it: the collector then tracks a tensor that nothing but C++ refers to, as if a library had it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from nbguard.memory.scan.heap.walk import Walk, references_by_asking


def held_by_cpp_alone(walk: Walk, objects: list[Any]) -> list[Any]:
    """Return the tensors among `objects` that one holder in C++ has and no object of Python's, besides this list."""
    autograd, ours = walk.referents.autograd, references_by_asking()
    if autograd is None:
        return []
    return [
        objects[n]
        for n in range(len(objects))
        if walk.kinds.of(type(objects[n])) == "tensor"
        and sys.getrefcount(objects[n]) == ours + 1  # the reference of C++ that keeps the object
        and autograd.cpp_references(objects[n]) == 1
    ]


def without_saved_copies(walk: Walk, tensors: list[Any]) -> list[Any]:
    """Return those of `tensors`, each held by C++ alone, that are no copy of a result which a graph of the walk has saved."""
    unpacked = Counter(_unpacked(walk))
    left = []
    for tensor in tensors:
        if id(tensor) in walk.number:
            continue
        storage = walk.storage_of(tensor)
        if storage is not None and unpacked[storage]:
            unpacked[storage] -= 1
        else:
            left.append(tensor)
    return left


def _unpacked(walk: Walk) -> Iterator[int]:
    """Yield the storage of each tensor that a node unpacked when the walk asked it: one for each copy that graphs keep."""
    autograd, ours = walk.referents.autograd, references_by_asking()
    for node, kind in enumerate(walk.kind):
        for child in walk.children[node] if kind == "graph" else ():
            if walk.kind[child] == "tensor" and sys.getrefcount(walk.objects[child]) == ours:
                assert autograd is not None
                if not autograd.cpp_references(walk.objects[child]):
                    yield from walk.holds.get(child, ())
