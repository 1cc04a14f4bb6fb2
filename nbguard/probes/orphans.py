"""What no root of ours leads to: garbage that waits for the collector, or something that other code holds.

The collector's own rule decides: an object whose references are all known to come from the set itself has no holder
outside, and what is not reached from an object with one is garbage. What has a holder outside is followed upwards, in
whole passes over the heap, until a module's global is found or nothing more is.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Iterable
from typing import Any

from nbguard.probes.collectable import stuck_in_cpp
from nbguard.probes.heap import Walk, references_by_asking
from nbguard.probes.kinds import module_namespaces, name_of, namespace_of
from nbguard.probes.roots import LiveRoot

_CHUNK = 512
_MAX_CLIMB = 24
_FEW = 8  # so many objects gc.get_referrers finds faster than a pass of our own: it compares each reference with each
_UNCOUNTED = "graph"  # C++ owns the nodes of graphs: their counts say nothing
_HOLDS_IN_CPP = ("tensor", "graph")


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
    if held and _is_worth_it(walk, first, held, climb_above):
        named, held = _climb(walk, first, held)
    alive = _below(walk, first, held + [entry for _, entries in named for entry in entries])
    explained = _points(walk, first, [entry for _, entries in named for entry in entries])
    garbage = [n for n in range(first, len(walk.objects)) if n not in alive]
    unknown = [n for n in held if _points(walk, first, [n]) - explained]
    tied = [n for n in unknown if n in _below(walk, first, walk.children[n])] + sorted(stuck_in_cpp(walk, garbage))
    if tied:
        whole = _below(walk, first, tied)
        named.append((LiveRoot("library", "unreachable C++ cycle", (), what=_tie(walk, whole)), tied))
        garbage = [n for n in garbage if n not in whole]
        unknown = [n for n in unknown if n not in whole]
    if garbage:
        named.append((LiveRoot("garbage", "unreachable cycles", (), what=_count(walk, garbage)), garbage))
    if unknown:
        named.append((LiveRoot("library", _tops(walk, unknown), (), what="held in a way that Python does not show"), unknown))
    return named


def _tie(walk: Walk, cycle: Iterable[int]) -> str:
    """Return what ties a cycle that Python cannot collect together, as far as it shows."""
    by_kind: dict[str, list[Any]] = {}
    for n in cycle:
        by_kind.setdefault(walk.kind[n], []).append(walk.objects[n])
    autograd = walk.referents.autograd
    hooked = autograd is not None and any(autograd.has_hooks(tensor) for tensor in by_kind.get("tensor", ()))
    what = "a hook refers to its own tensor" if hooked else "a graph, a view or a C library refers back to it"
    if not hooked and "array" in by_kind:
        what = "an array of objects refers back to itself"
    return f"{what}: Python cannot collect that"


def _tops(walk: Walk, held: list[int]) -> str:
    """Return what is at the top of what cannot be followed further, e.g. `libraries (a Tensor, a dict)`."""
    names = sorted({name_of(type(walk.objects[n])) for n in held})
    return f"libraries ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _is_worth_it(walk: Walk, first: int, held: list[int], climb_above: int) -> bool:
    points = _points(walk, first, held)
    storages = {storage for n in points for storage in walk.holds.get(n, ())}
    nbytes = sum(walk.storages[storage].nbytes for storage in storages)
    return nbytes > climb_above or any(walk.kind[n] == "learner" for n in points)


def _held_outside(walk: Walk, first: int) -> list[int]:
    """Return the objects from `first` on that have more references than the set itself accounts for."""
    inside = [0] * (len(walk.objects) - first)
    in_cpp: Counter[int] = Counter()
    for parent in range(first, len(walk.objects)):
        for child in walk.children[parent]:
            if child >= first:
                inside[child - first] += 1
        if walk.kind[parent] in _HOLDS_IN_CPP:
            shown = {id(ref) for ref in gc.get_referents(walk.objects[parent])}
            in_cpp.update(child for child in walk.children[parent] if id(walk.objects[child]) not in shown)
    ours = references_by_asking()
    objects = walk.objects
    found = []
    for n in range(first, len(objects)):
        if walk.kind[n] == _UNCOUNTED:
            continue
        extra = sys.getrefcount(objects[n]) - ours - inside[n - first]
        if walk.kind[n] == "tensor" and walk.referents.autograd is not None:
            references = walk.referents.autograd.cpp_references(objects[n])
            extra -= references > 0  # C++ keeps the Python object, too
            if references > in_cpp[n]:  # by more than the graphs, gradients and views that were found: a cache, a library
                extra += 1
        if extra > 0:
            found.append(n)
    matters = walk.leading_to((n for n in range(first, len(objects)) if _is_point(walk, n)), first)
    return [n for n in found if n in matters]  # a `print` or a lock that everybody holds explains nothing


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
    """Follow holders upwards, the nearest first; return roots that could be named and what else is held outside.

    A climb ends when all that it set out from is explained by a named root: that root may itself be known by many names.
    """
    named: list[tuple[LiveRoot, list[int]]] = []
    explained: set[int] = set()
    asked: set[int] = set()
    lowest = len(walk.objects)
    modules = {id(namespace): name for name, namespace in module_namespaces().items()}
    for _ in range(_MAX_CLIMB):
        asking = {id(walk.objects[n]): n for n in held if n not in asked and _points(walk, first, [n]) - explained}
        if not asking:
            break
        asked.update(asking.values())
        found: list[tuple[LiveRoot, list[int]]] = []
        new = len(walk.objects)
        for holder in _referrers(walk, set(asking)):
            held_by_it = [asking[id(child)] for child in gc.get_referents(holder) if id(child) in asking]
            label, what = _name_of_root(walk, first, holder, held_by_it, modules)
            if label:
                found.append((LiveRoot("library", label, (), what=what), held_by_it))
            elif id(holder) not in walk.number:
                walk.add_unwalked(holder)
            del holder
        for frame in _callers(walk, new):
            walk.add_unwalked(frame)
            del frame
        for root, entries in sorted(found, key=lambda each: _foreign(walk, *each)):
            if points := _points(walk, first, entries) - explained:
                named.append((root, entries))
                explained |= points
        for n in range(lowest, len(walk.objects)):  # holders may hold holders that were found after them
            below = (walk.number.get(id(ref), -1) for ref in gc.get_referents(walk.objects[n]))  # no list of ours may stay:
            walk.children[n] = [at for at in below if at >= first]  # it would count as a holder
        held = _held_outside(walk, first)
    return named, held


def _callers(walk: Walk, new: int) -> list[Any]:
    """Return the frames and tracebacks that hold those met from number `new` on, all the way up: chains of dozens are usual.

    A finished frame is held by the frames it called (`f_back`), as long as any traceback keeps one of them.
    """
    kinds = (types.FrameType, types.TracebackType)
    met = {id(obj) for obj in walk.objects[new:] if type(obj) in kinds}
    if not met:
        return []
    above: dict[int, list[Any]] = {}
    for obj in gc.get_objects():
        if type(obj) in kinds:
            for ref in gc.get_referents(obj):
                if type(ref) in kinds:
                    above.setdefault(id(ref), []).append(obj)
    found: dict[int, Any] = {}
    todo = list(met)
    while todo:
        for obj in above.get(todo.pop(), ()):
            if id(obj) not in met and id(obj) not in walk.number:
                met.add(id(obj))
                found[id(obj)] = obj
                todo.append(id(obj))
    return list(found.values())


def _points(walk: Walk, first: int, tops: list[int]) -> set[int]:
    """Return the objects below `tops` that need an explanation."""
    return {n for n in _below(walk, first, tops) if _is_point(walk, n)}


def _is_point(walk: Walk, number: int) -> bool:
    """Say whether an object needs an explanation of what holds it: a holder of a storage or of a pool, or a Learner."""
    return number in walk.holds or walk.kind[number] in ("learner", "pool")


def _foreign(walk: Walk, root: LiveRoot, entries: list[int]) -> tuple[bool, str]:
    """Order names of one and the same thing: its class, or the module that defines its class, knows it best."""
    if root.what == "class of a library":
        return False, root.label
    home = namespace_of(type(walk.objects[entries[0]])).get("__module__")
    return not (type(home) is str and root.label.startswith(f"{home}.")), root.label


def _name_of_root(walk: Walk, first: int, holder: Any, held_by_it: list[int], modules: dict[int, str]) -> tuple[str, str]:
    """Return (label, explanation) if `holder` is where a climb ends: a module's globals, or what a root leads to already."""
    module = modules.get(id(holder))
    if module is not None:
        return _global_name(module, holder, walk.objects[held_by_it[0]]), "global of a library"
    if walk.kinds.of(type(holder)) == "class":
        return f"{namespace_of(holder).get('__module__')}.{name_of(holder)}", "class of a library"
    if walk.number.get(id(holder), first) < first:
        return f"a {name_of(type(holder))} that you hold", "held in a way that is not followed"
    return "", ""


def _referrers(walk: Walk, ids: set[int]) -> list[Any]:
    """Return the tracked objects that refer to any of `ids`, in one pass, without our own bookkeeping."""
    if len(ids) <= _FEW:
        few = tuple([walk.objects[walk.number[key]] for key in ids])  # a list would be copied: since 3.13 the copy is found
        own = {id(few), id(walk.objects), id(sys._getframe())}
        return [obj for obj in gc.get_referrers(*few) if id(obj) not in own]
    everything = gc.get_objects()
    own = {id(everything), id(walk.objects)}
    found: list[Any] = []
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
