"""What no root of ours leads to: garbage that waits for the collector, or something that other code holds.

The collector's own rule decides: an object whose references are all known to come from the set itself has no holder
outside, and what is not reached from an object with one is garbage. What has a holder outside is followed upwards, in
whole passes over the heap, until a module's global is found or nothing more is.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from nbguard.probes.heap import Walk
from nbguard.probes.roots import LiveRoot

_CHUNK = 512
_MAX_CLIMB = 8
_UNCOUNTED = frozenset({"graph", "frame"})  # owned by C++ and by running code: their counts say nothing


def orphan_roots(walk: Walk, climb_above: int) -> list[tuple[LiveRoot, list[int]]]:
    """Walk what no root has led to and return its roots: garbage, and holders in libraries.

    Holders of less than `climb_above` bytes in all, and of no Learner, are not followed upwards (a pass over a large heap
    costs some 0.2 s each): they come out as one root of kind `library`.
    """
    first = len(walk.objects)
    for obj in walk.unreached():
        walk.add(obj)
        del obj
    if len(walk.objects) == first:
        return []
    walk.run()
    held = _held_outside(walk, first)
    named: list[tuple[LiveRoot, list[int]]] = []
    if held and _is_worth_it(walk, first, climb_above):
        named, held = _climb(walk, first, held)
    alive = _below(walk, first, held + [entry for _, entries in named for entry in entries])
    garbage = [n for n in range(first, len(walk.objects)) if n not in alive]
    if garbage:
        named.append((LiveRoot("garbage", "unreachable cycles", (), what=_count(walk, garbage)), garbage))
    if held:
        named.append((LiveRoot("library", "libraries", (), what="held outside your variables"), held))
    return named


def _is_worth_it(walk: Walk, first: int, climb_above: int) -> bool:
    if "learner" in walk.kind[first:]:
        return True
    storages = {storage for n in range(first, len(walk.objects)) for storage in walk.holds.get(n, ())}
    return sum(walk.storages[storage].nbytes for storage in storages) > climb_above


def _held_outside(walk: Walk, first: int) -> list[int]:
    """Return the objects from `first` on that have more references than the set itself accounts for."""
    inside = [0] * (len(walk.objects) - first)
    for parent in range(first, len(walk.objects)):
        for child in walk.children[parent]:
            if child >= first:
                inside[child - first] += 1
    probe = [object()]
    ours = sys.getrefcount(probe[0])  # what the list and this very call account for
    objects = walk.objects
    found = []
    for n in range(first, len(objects)):
        if walk.kind[n] in _UNCOUNTED:
            continue
        extra = sys.getrefcount(objects[n]) - ours - inside[n - first]
        if extra > 0 and walk.kind[n] == "tensor" and walk.referents.autograd is not None:
            extra -= (
                walk.referents.autograd.use_count(objects[n]) > 1
            )  # C++ (a graph, a gradient) keeps the Python object
        if extra > 0:
            found.append(n)
    return found


def _below(walk: Walk, first: int, tops: Iterable[int]) -> set[int]:
    seen = {n for n in tops if n >= first}
    todo = list(seen)
    while todo:
        for child in walk.children[todo.pop()]:
            if child >= first and child not in seen:
                seen.add(child)
                todo.append(child)
    return seen


def _climb(walk: Walk, first: int, held: list[int]) -> tuple[list[tuple[LiveRoot, list[int]]], list[int]]:
    """Follow holders upwards; return roots that could be named and the objects whose holder cannot be found."""
    named: list[tuple[LiveRoot, list[int]]] = []
    settled: set[int] = set()
    asked: set[int] = set()
    modules = {id(m.__dict__): name for name, m in list(sys.modules.items()) if type(m) is type(sys)}
    for _ in range(_MAX_CLIMB):
        asking = {id(walk.objects[n]): n for n in held if n not in settled and n not in asked}
        if not asking:
            break
        asked.update(asking.values())
        for holder in _referrers(walk, set(asking)):
            refs = [asking[id(child)] for child in gc.get_referents(holder) if id(child) in asking]
            module = modules.get(id(holder))
            if module is not None:
                named += [
                    (
                        LiveRoot(
                            "library", _global_name(module, holder, walk.objects[n]), (), what="global of a library"
                        ),
                        [n],
                    )
                    for n in refs
                ]
                settled.update(refs)
            elif id(holder) in walk.number and walk.number[id(holder)] < first:
                settled.update(refs)
                named.append(
                    (
                        LiveRoot(
                            "library", f"a {name_of(type(holder))} of yours", (), what="held in a way not followed"
                        ),
                        refs,
                    )
                )
            elif id(holder) not in walk.number and walk.kinds.of(type(holder)) != "class":
                walk.objects.append(holder)
                walk.kind.append(walk.kinds.of(type(holder)))
                walk.number[id(holder)] = len(walk.objects) - 1
                walk.children.append(
                    [walk.number[id(c)] for c in gc.get_referents(holder) if walk.number.get(id(c), -1) >= first]
                )
            del holder
        held = _held_outside(walk, first)
    return named, [n for n in held if n not in settled]


def _referrers(walk: Walk, ids: set[int]) -> list[Any]:
    """Return the tracked objects that refer to any of `ids`, in one pass, without our own bookkeeping."""
    everything = gc.get_objects()
    own = {id(everything), id(walk.objects), id(sys._getframe()), id(walk.number)}
    found = []
    for at in range(0, len(everything), _CHUNK):
        chunk = everything[at : at + _CHUNK]
        if ids.isdisjoint(map(id, gc.get_referents(*chunk))):
            continue
        found += [obj for obj in chunk if id(obj) not in own and not ids.isdisjoint(map(id, gc.get_referents(obj)))]
    return found


def _global_name(module: str, namespace: dict[str, Any], obj: Any) -> str:
    for name, value in list(namespace.items()):
        if value is obj and type(name) is str:
            return f"{module}.{name}"
    return module


def _count(walk: Walk, garbage: list[int]) -> str:
    """Return what garbage is made of, e.g. `2 Learners, 3 models`, largest notion first."""
    for kind, one, many in (
        ("learner", "earlier Learner", "earlier Learners"),
        ("model", "module", "modules"),
        ("loader", "DataLoader", "DataLoaders"),
    ):
        count = sum(walk.kind[n] == kind for n in garbage)
        if count:
            return f"{count} {one if count == 1 else many}"
    tensors = sum(walk.kind[n] == "tensor" for n in garbage)
    return f"{tensors} tensor{'s' if tensors != 1 else ''}"
