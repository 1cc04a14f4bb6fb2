"""Dicts of hooks that C++ keeps for autograd graphs and tensors, so that Python shows no holder.

A hook on the result of an operation, on a node, or of a module's whole backward pass belongs to a node in C++. PyTorch has no
way from the node to its hooks. As one of the graphs has them, they count as held until the last graph goes which may be it.
"""

from __future__ import annotations

from collections import OrderedDict

from nbguard.memory.scan.heap.walk import Walk


def lead_to_hooks(walk: Walk, held: list[int]) -> set[int]:
    """Have the walk's graphs lead to the dicts of hooks among `held`, objects without a known holder; return these dicts."""
    hooks = {n for n in held if _is_of_hooks(walk.objects[n])}
    if not hooks or walk.rest is not None:
        return set()
    owners: dict[int, int] = {}
    last = []
    for n, (kind, children) in enumerate(zip(walk.kind, walk.children, strict=True)):
        if kind == "tensor":
            owners.update((child, n) for child in children if child in hooks)
        elif kind == "graph" and not any(walk.kind[child] == "graph" for child in children):
            last.append(n)  # each node of a graph leads to such a one
    for n in sorted(hooks):
        of_tensor = [child for child in walk.children[owners[n]] if walk.kind[child] == "graph"] if n in owners else last
        for node in of_tensor:
            walk.children[node].append(n)
    return hooks if last else hooks & owners.keys()


def _is_of_hooks(obj: object) -> bool:
    """Say whether an object is a dict as PyTorch makes them for hooks, by the numbers of their handles."""
    return type(obj) is OrderedDict and bool(dict.__len__(obj)) and all(type(key) is int for key in dict.keys(obj))
