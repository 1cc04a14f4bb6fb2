"""Names for objects that no root leads to, found by their referrers, followed upwards to a module's global or a class."""

from __future__ import annotations

import contextvars
import gc
import sys
import types
from collections.abc import Iterable
from functools import partial
from operator import is_not
from typing import Any

from nbguard.memory.core.facts import EXPERIMENT_KINDS
from nbguard.memory.scan.heap.kinds import name_of, namespace_of, never_asked
from nbguard.memory.scan.heap.walk import Walk
from nbguard.memory.scan.outside.outside_references import Region
from nbguard.memory.scan.roots.root import LiveRoot

_CHUNK = 512
_MOST_STEPS = 24
_FEWEST_STEPS = 4
"""Steps upwards that are taken however large the heap is."""
_MOST_OBJECTS = 12_000_000
"""Objects that the steps together may go over: each is a pass over the heap, and a data set in lists has millions."""
_FEW = 8  # so many objects gc.get_referrers finds faster than a pass of our own: it compares each reference with each
_GLOBAL = "global of a library"
_NOT_FOLLOWED = "held in a way that is not followed"


def name_by_referrers(
    region: Region, held: list[int], explained: Iterable[int] = ()
) -> tuple[list[tuple[LiveRoot, list[int]]], list[int]]:
    """Follow holders upwards, the nearest first; return the roots that could be named and the other objects held outside.

    The search ends when all that it set out from is explained by a named root: that root may itself be known by many names.
    `explained` is explained already.
    """
    walk = region.walk
    named: list[tuple[LiveRoot, list[int]]] = []
    explained = set(explained)
    asked: set[int] = set()
    lowest = len(walk.objects)
    modules = {id(namespace): name for name, namespace in walk.kinds.modules.items()} | walk.shell
    for step in range(1, _MOST_STEPS + 1):
        asking = {id(walk.objects[n]): n for n in sorted(region.pointing(held, explained)) if n not in asked}
        if not asking or (step > _FEWEST_STEPS and step * len(gc.get_objects()) > _MOST_OBJECTS):
            break
        asked.update(asking.values())
        roots: list[tuple[LiveRoot, list[int]]] = []
        new = len(walk.objects)
        for holder in _referrers(walk, set(asking)):
            held_by_it = [asking[id(child)] for child in gc.get_referents(holder) if id(child) in asking]
            if id(holder) in walk.places:
                held_by_it = [n for n in held_by_it if n not in walk.entries]
            if held_by_it and not _is_accounted_for(region, holder, held_by_it):  # another thread may have let go of it since
                if modules.get(id(holder)) is None and (threads := _threads(walk, holder, held_by_it)):
                    roots += threads
                    continue
                label, what, module = _name_of_root(region, holder, held_by_it, modules)
                if label:
                    is_class = walk.kinds.of(type(holder)) == "class"
                    root = LiveRoot(
                        kind="library",
                        label=label,
                        objects=(),
                        what=what,
                        module=module,
                        is_class=is_class,
                        ended_by=_unbinding(walk, label, module, held_by_it) if what == _GLOBAL else "",
                    )
                    roots.append((root, held_by_it))
                elif id(holder) not in walk.number:
                    walk.add_unwalked(holder)
            del holder
        for frame in _callers(walk, new):
            walk.add_unwalked(frame)
            del frame
        for root, entries in sorted(roots, key=lambda named_root: _foreign(walk, *named_root)):
            if points := region.points(entries) - explained:
                named.append((root, entries))
                explained |= points
        for n in range(lowest, len(walk.objects)):  # holders may hold holders that were found after them
            below = (walk.number.get(id(ref), -1) for ref in gc.get_referents(walk.objects[n]))  # no list of ours may stay:
            walk.children[n] = [at for at in below if at >= 0]  # it would count as a holder
        region.extend()
        held = region.held()
    return named, held


def unnamed_roots(walk: Walk, held: list[int]) -> list[tuple[LiveRoot, list[int]]]:
    """Return the roots of objects whose holder cannot be followed further; the label has their types.

    Python shows who has a context, but for the one that a thread is in.
    """
    contexts = [n for n in held if type(walk.objects[n]) is contextvars.Context]
    roots = []
    if contexts:
        what = "values of context variables there"
        root = LiveRoot(kind="library", label="context of a thread", objects=(), what=what, registry="thread")
        roots.append((root, contexts))
    if others := [n for n in held if n not in contexts]:
        names = sorted({name_of(type(walk.objects[n])) for n in others})
        label = f"libraries ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        what = "held in a way that Python does not show"
        roots.append((LiveRoot(kind="library", label=label, objects=(), what=what, is_shown=False), others))
    return roots


def _threads(walk: Walk, holder: Any, held_by_it: list[int]) -> list[tuple[LiveRoot, list[int]]]:
    """Return a root for each running thread that the registry of `threading` holds; none where `holder` is something else."""
    threading: Any = sys.modules["threading"]
    if holder is not threading._active:
        return []
    return [(_thread_root(walk.objects[n]), [n]) for n in held_by_it]


def _thread_root(thread: Any) -> LiveRoot:
    threading: Any = sys.modules["threading"]
    name = str(object.__getattribute__(thread, "_name"))  # its dict, once it is made, would stand between it and its attributes
    line = f"import threading; [(t.cancel(), t.join()) for t in threading.enumerate() if t.name == {name!r}];"
    is_timer = type(thread) is threading.Timer
    what = "waits until its time comes" if is_timer else "runs"
    ended_by = line if is_timer else ""
    return LiveRoot(kind="library", label=f"thread {name}", objects=(), what=what, thread=name, ended_by=ended_by)


def _is_accounted_for(region: Region, holder: Any, held_by_it: list[int]) -> bool:
    """Say whether a holder is in use itself, and the walk knows that it has these objects."""
    number = region.walk.number.get(id(holder), region.known)
    return number < region.known and set(held_by_it) <= set(region.walk.children[number])


def _callers(walk: Walk, new: int) -> list[Any]:
    """Return the frames and tracebacks that hold those met from number `new` on, all the way up: chains of dozens are usual.

    A finished frame is held by the frames it called (`f_back`), as long as any traceback keeps one of them.
    """
    kinds = {id(types.FrameType), id(types.TracebackType)}
    met = {id(obj) for obj in walk.objects[new:] if id(type(obj)) in kinds}
    if not met:
        return []
    above: dict[int, list[Any]] = {}
    for obj in gc.get_objects():
        if id(type(obj)) in kinds:
            for ref in gc.get_referents(obj):
                if id(type(ref)) in kinds:
                    above.setdefault(id(ref), []).append(obj)
    callers: dict[int, Any] = {}
    todo = list(met)
    while todo:
        for obj in above.get(todo.pop(), ()):
            if id(obj) not in met and id(obj) not in walk.number:
                met.add(id(obj))
                callers[id(obj)] = obj
                todo.append(id(obj))
    return list(callers.values())


def _foreign(walk: Walk, root: LiveRoot, entries: list[int]) -> tuple[bool, bool, str]:
    """Order names of one and the same thing: its class, or the module that defines its class, knows it best.

    A private module (a debugger's list of threads) comes last.
    """
    is_private = root.label.startswith("_")
    if root.is_class:
        return False, is_private, root.label
    home = namespace_of(type(walk.objects[entries[0]])).get("__module__")
    return not (type(home) is str and root.label.startswith(f"{home}.")), is_private, root.label


def _name_of_root(region: Region, holder: Any, held_by_it: list[int], modules: dict[int, str]) -> tuple[str, str, str]:
    """Return (label, explanation, module) if `holder` is where the search ends: a module's globals, or below a root.

    The label is an expression once that module is imported; without a module it is none.
    """
    walk, module = region.walk, modules.get(id(holder))
    if module is not None:
        label = _global_name(module, holder, walk.objects[held_by_it[0]])
        if id(holder) in walk.shell:
            return label, "attribute of IPython", ""
        if module == "__main__":
            return label.removeprefix("__main__."), _NOT_FOLLOWED, ""
        return label, _GLOBAL, module if label != module else ""
    if walk.kinds.of(type(holder)) == "class":
        module = str(namespace_of(holder).get("__module__"))
        space = {id(ref) for ref in gc.get_referents(namespace_of(holder))}
        walk.class_spaces.update(space)
        is_global = vars(sys.modules.get(module, types)).get(name_of(holder)) is holder
        label = _global_name(f"{module}.{name_of(holder)}", namespace_of(holder), walk.objects[held_by_it[0]])
        return label, "class of a library", module if is_global else ""
    if walk.number.get(id(holder), region.known) < region.known:
        return f"a {name_of(type(holder))} that you hold", _NOT_FOLLOWED, ""
    return "", "", ""


def _unbinding(walk: Walk, label: str, module: str, held_by_it: list[int]) -> str:
    """Return the line that binds a global to None which is itself an experiment or a tensor; an empty string for others."""
    is_thing = len(held_by_it) == 1 and walk.kind[held_by_it[0]] in EXPERIMENT_KINDS | {"tensor"}
    return f"import {module}; {label} = None" if module and is_thing else ""


def _referrers(walk: Walk, ids: set[int]) -> list[Any]:
    """Return the tracked objects that refer to any of `ids`, in one pass, without our own bookkeeping."""
    if len(ids) <= _FEW:
        few = tuple([walk.objects[walk.number[key]] for key in ids])  # a list would be copied: since 3.13 the copy is found
        own = {id(few), id(walk.objects), id(sys._getframe()), id(never_asked())}
        return [obj for obj in gc.get_referrers(*few) if id(obj) not in own]
    everything = list(filter(partial(is_not, never_asked()), gc.get_objects()))
    own = {id(everything), id(walk.objects)}
    referrers: list[Any] = []
    for at in range(0, len(everything), _CHUNK):
        chunk = everything[at : at + _CHUNK]
        if ids.isdisjoint(map(id, gc.get_referents(*chunk))):
            continue
        referrers += [obj for obj in chunk if id(obj) not in own and not ids.isdisjoint(map(id, gc.get_referents(obj)))]
    return referrers


def _global_name(module: str, namespace: Any, obj: Any) -> str:
    """Return how an attribute of a module or class is written; for another kind of holder, the module or class alone."""
    for name, value in list(namespace.items()):
        if value is obj and type(name) is str:
            return f"{module}.{name}"
    return module
