"""Objects that no root leads to, or that are held from outside, with names from their referrers and their other holders."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set
from operator import is_not
from typing import Any

from nbguard.libraries import emptied_by
from nbguard.memory.core.facts import EXPERIMENT_KINDS
from nbguard.memory.core.references.graph import upwards
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.heap.kinds import Types, module_namespace, name_of, namespace_of, never_asked
from nbguard.memory.scan.heap.referents import has_values_of_an_object
from nbguard.memory.scan.heap.walk import Walk, made_for_array, references_by_asking
from nbguard.memory.scan.roots.frames import LiveRoot

# --- Objects that are held from outside of a set, by the collector's own rule, with the references of C++ counted in.


_UNCOUNTED = ("graph", "class")  # C++ owns the nodes of graphs, and a class its descriptors: their counts say nothing
_IN_NUMPY = ("array", "part of an array")  # numpy's iterators, and tensors made of arrays, refer to them in C
_HOLDS_IN_CPP = ("tensor", "graph", "script")
_OF_AN_ERROR = ("frame", "traceback")  # many places hold these; a cleanup leaves them where they are
_FRAMES = Types((types.FrameType, types.TracebackType))


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
            self._frames = {n for n in range(self._stop) if type(walk.objects[n]) in _FRAMES}
        else:
            self._frames = {n for n in walk.only_stale if walk.kind[n] in _OF_AN_ERROR}
        goals = [n for n in range(self.first, self._added) if is_goal(walk, n)]
        self._leading = walk.leading_to(goals, self.first)
        blocked = () if named else self._frames
        self._wanted = self._leading if named else walk.leading_to(goals, self.first, blocked)
        self._blocked: Collection[int] = blocked

    def extend(self) -> None:
        """Take in objects newly added to the walk that lead to something of the region."""
        self._leading = self.walk.leading_to(self._leading, self._added)
        self._wanted = self.walk.leading_to(self._wanted, self._added, self._blocked)

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
                extra -= references > 0  # C++ keeps the Python object, too
                if references > in_cpp[n]:  # by more than the graphs, gradients and views that were found: a cache, a library
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
        return {n for n in reached if n in self.walk.only_stale or is_goal(self.walk, n)}

    def pointing(self, tops: Iterable[int], named: Set[int], in_use: Set[int] = frozenset()) -> set[int]:
        """Return those of `tops` that lead to points not `in_use` past the `named` objects: in one pass, however many they are.

        Whoever leads to a point by a named object alone lets go of it once the root of that object does: child loggers, where
        the root logger has a model. Whoever leads to it another way keeps it, and must be named, too.
        """
        tops = set(tops) - named
        within = self._leading - named
        reached = below(self.walk, self.first, tops, within)
        parents: dict[int, list[int]] = {}
        for parent in reached:
            for child in self.walk.children[parent]:
                if child >= self.first and child in within:
                    parents.setdefault(child, []).append(parent)
        return tops & upwards(parents, self._points_among(reached) - in_use)


def _elements(walk: Walk, array: int) -> Iterator[int]:
    """Yield the elements of an object array, once for each reference: the walk has it by lists that were made for it.

    For objects that no root leads to these count as references from outside: the collector does not see them either.
    """
    for holder in made_for_array(walk, array)[-1]:
        yield from walk.children[holder]


def below(walk: Walk, first: int, tops: Iterable[int], within: Collection[int] | None = None) -> set[int]:
    """Return the objects from number `first` on, of those `within`, that `tops` lead to, these included."""
    reached = {n for n in tops if n >= first}
    todo = list(reached)
    while todo:
        for child in walk.children[todo.pop()]:
            if child >= first and child not in reached and (within is None or child in within):
                reached.add(child)
                todo.append(child)
    return reached


def is_goal(walk: Walk, number: int) -> bool:
    """Say whether an object matters by itself: it holds a storage or a pool, or is a Learner."""
    return number in walk.holds or walk.kind[number] in ("learner", "pool")


_CHUNK = 512
_MOST_STEPS = 24
_FEWEST_STEPS = 4
"""Steps upwards that are taken however large the heap is."""
_MOST_OBJECTS = 12_000_000
"""Objects that the steps together may go over: each is a pass over the heap, and a data set in lists has millions."""
_FEW = 8  # so many objects gc.get_referrers finds faster than a pass of our own: it compares each reference with each
_GLOBAL = "global of a library"
_NOT_FOLLOWED = "held in a way that is not followed"


def name_by_referrers(region: Region, held: list[int], in_use: Set[int] = frozenset()) -> tuple[list[Rooted], list[int]]:
    """Follow holders upwards, the nearest first; return the roots that could be named and the other objects held outside.

    A root's object may be known by many names, of which the first is taken. No holder of the points `in_use` is looked for.
    """
    walk = region.walk
    named: list[Rooted] = []
    entered: set[int] = set()  # objects of named roots
    asked: set[int] = set()
    modules = {id(namespace): name for name, namespace in walk.kinds.modules.items()} | walk.shell
    size = 0  # of the heap; to count it is a pass, too
    for step in range(1, _MOST_STEPS + 1):
        asking = {id(walk.objects[n]): n for n in sorted(region.pointing(held, entered, in_use)) if n not in asked}
        if step > _FEWEST_STEPS:
            size = size or len(gc.get_objects())
        if not asking or step * size > _MOST_OBJECTS:
            break
        asked.update(asking.values())
        roots: list[Rooted] = []
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
            if region.pointing(entries, entered, in_use):
                named.append((root, entries))
                entered |= entered_by(walk, [named[-1]])
        for n in walk.unwalked:  # holders may hold holders that were found after them, by another search as well
            below = (walk.number.get(id(ref), -1) for ref in gc.get_referents(walk.objects[n]))  # no list of ours may stay:
            walk.children[n] = [at for at in below if at >= 0]  # it would count as a holder
        region.extend()
        held = region.held()
    return _needed(region, named, in_use), held


def _needed(region: Region, named: list[Rooted], in_use: Set[int]) -> list[Rooted]:
    """Return the roots without those that lead to points by another one's objects alone.

    Each was named without those of later steps: the globals of a hundred modules are loggers, which have the one registry of
    `logging.Logger` as an attribute, and the class's own dict lies a step behind them.
    """
    needed: list[Rooted] = []
    for each in sorted(named, key=lambda root: _foreign(region.walk, *root)):
        if region.pointing(each[1], entered_by(region.walk, needed), in_use):
            needed.append(each)
    return [root for root in named if root in needed] if len(needed) < len(named) else named


def entered_by(walk: Walk, roots: Iterable[Rooted]) -> set[int]:
    """Return the objects that `roots` hold directly, as a module its globals; a class holds its attributes by a dict."""
    held = {n for _, entries in roots for n in entries}
    return held | {child for n in held if id(walk.objects[n]) in walk.class_spaces for child in walk.children[n]}


def unnamed_roots(walk: Walk, held: list[int]) -> list[Rooted]:
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


def _threads(walk: Walk, holder: Any, held_by_it: list[int]) -> list[Rooted]:
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
    """Order names of one and the same thing: its class, or the module that defines it or its class, knows it best.

    A private module (a debugger's list of threads) comes last.
    """
    is_private = root.label.startswith("_")
    if root.is_class:
        return False, is_private, root.label
    home = _home(walk.objects[entries[0]])
    return not (type(home) is str and root.label.startswith(f"{home}.")), is_private, root.label


def _home(obj: Any) -> Any:
    """Return the module that defines a function or the class of another object, without asking the object."""
    if type(obj) is functools._lru_cache_wrapper:
        return functools._lru_cache_wrapper.__dict__["__dict__"].__get__(obj).get("__module__")
    if type(obj) is types.FunctionType:
        return types.FunctionType.__dict__["__module__"].__get__(obj)
    return namespace_of(type(obj)).get("__module__")


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
        if label == module:
            return label, _GLOBAL, ""
        return (label, _GLOBAL, module) if _is_written(module) else (_by_key(module, label), _GLOBAL, "sys")
    if walk.kinds.of(type(holder)) == "class":
        module = str(namespace_of(holder).get("__module__"))
        space = {id(ref) for ref in gc.get_referents(namespace_of(holder))}
        walk.class_spaces.update(space)
        is_global = vars(sys.modules.get(module, types)).get(name_of(holder)) is holder
        label = _global_name(f"{module}.{name_of(holder)}", namespace_of(holder), walk.objects[held_by_it[0]])
        if is_global and not _is_written(module):
            return _by_key(module, label), "class of a library", "sys"
        return label, "class of a library", module if is_global else ""
    number = walk.number.get(id(holder), region.known)
    if number < region.known and number not in walk.unwalked:  # those have a root already
        return f"a {name_of(type(holder))} that you hold", _NOT_FOLLOWED, ""
    return "", "", ""


def _is_written(module: str) -> bool:
    """Say whether the name of a module evaluates to it. A function of the same name in its package hides it."""
    names = module.split(".")
    for count, name in enumerate(names[1:], start=1):
        space, inner = module_namespace(sys.modules.get(".".join(names[:count]))), sys.modules.get(".".join(names[: count + 1]))
        if space is not None and space.get(name, inner) is not inner:
            return False
    return True


def _by_key(module: str, label: str) -> str:
    """Return a label of a module's as an expression that leads to the module in any case."""
    return f"sys.modules[{module!r}]{label.removeprefix(module)}"


def _unbinding(walk: Walk, label: str, module: str, held_by_it: list[int]) -> str:
    """Return the line that binds a global to None which is itself an experiment or a tensor; an empty string for others.

    A registry that its library has a line for is emptied by that one.
    """
    cls = type(walk.objects[held_by_it[0]])
    if len(held_by_it) == 1 and (own := emptied_by().get((str(namespace_of(cls).get("__module__")), name_of(cls)))):
        return own
    is_thing = len(held_by_it) == 1 and walk.kind[held_by_it[0]] in EXPERIMENT_KINDS | {"tensor"}
    return f"import {module}; {label} = None" if module and is_thing else ""


def _referrers(walk: Walk, ids: set[int]) -> list[Any]:
    """Return the tracked objects that refer to any of `ids`, in one pass, without our own bookkeeping."""
    asked = [walk.objects[walk.number[key]] for key in ids]
    own = {id(asked), id(walk.objects), id(sys._getframe()), id(never_asked())}
    if native.compiled is not None:
        found = native.compiled.referrers(gc.get_objects(), asked)
    elif len(ids) <= _FEW:
        few = tuple(asked)  # a list would be copied: since 3.13 the copy is found
        own.add(id(few))
        found = gc.get_referrers(*few)
    else:
        found = _referrers_of_many(ids)
    return [obj for obj in found if id(obj) not in own]


def _referrers_of_many(ids: set[int]) -> list[Any]:
    everything = list(filter(functools.partial(is_not, never_asked()), gc.get_objects()))
    referrers: list[Any] = []
    for at in range(0, len(everything), _CHUNK):
        chunk = everything[at : at + _CHUNK]
        if not ids.isdisjoint(map(id, gc.get_referents(*chunk))):
            referrers += [obj for obj in chunk if not ids.isdisjoint(map(id, gc.get_referents(obj)))]
    return referrers


def _global_name(module: str, namespace: Any, obj: Any) -> str:
    """Return how an attribute of a module or class is written; for another kind of holder, the module or class alone."""
    for name, value in list(namespace.items()):
        if value is obj and type(name) is str:
            return f"{module}.{name}"
    return module


# --- Holders besides the user's names, such as references of a library, or C++, to the objects that names lead to.
#
# `log = logging.getLogger("zoo")` is the registry's as well: deleting the name frees nothing. The collector's rule tells such
# objects: they have more references than all that was walked accounts for. The rest are followed upwards, as those of objects
# that no name leads to.


def other_holders(walk: Walk, roots: list[Rooted]) -> list[Rooted]:
    """Return a root for each holder of an object that names lead to, where the walk has not met it.

    None where part of the heap was left out, as its references cannot be told from others'. Objects that `roots` of running
    code and of registries lead to are in use anyway, so that other holders don't matter.
    """
    if walk.rest is not None:
        return []
    region = Region(walk, named=True)
    held = region.held()
    if not held:
        return []
    in_use = region.points(n for root, entries in roots if root.kind in ("frame", "library") for n in entries)
    named, held = name_by_referrers(region, held, in_use)
    unknown = sorted(region.pointing(held, entered_by(walk, named), in_use))
    return [*named, *unnamed_roots(walk, unknown)]
