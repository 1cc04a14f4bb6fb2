"""Dicts of hooks that C++ keeps for autograd graphs and tensors, so that Python shows no holder.

A hook on the result of an operation, on a node, or of a module's whole backward pass belongs to a node in C++. PyTorch has no
way from the node to its hooks. As one of the graphs has them, they count as held until the last graph goes which may be it.

A hook whose function leads back to a graph, or to a tensor with a hook, closes a cycle through C++ that nothing frees.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Set

from nbguard.memory.scan.heap.walk import Walk
from nbguard.memory.scan.outside.region import below

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
