"""Objects that no root leads to, or that are held from outside, with names from their referrers and their other holders."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import threading
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any

from nbguard.libraries import emptied_by
from nbguard.memory.core.facts import EXPERIMENT_KINDS
from nbguard.memory.scan.heap.kinds import KeptTypes, Types, attribute_of, module_namespace, name_of, namespace_of
from nbguard.memory.scan.heap.walk import Walk, references_by_asking
from nbguard.memory.scan.outside.region import Holders, Region, Rooted, dicts_of_hooks, lead_to_hooks, referrers_of
from nbguard.memory.scan.roots.frames import LiveRoot, frame_locals, is_of_interest, running_frames

# --- Running threads as holders, by the registry of `threading` and by the variables of their functions.


_registry: Any = threading


def threads_of(walk: Walk, holder: Any, held_by_it: list[int]) -> list[Rooted]:
    """Return a root for each running thread that the registry of `threading` holds; none where `holder` is something else."""
    if holder is not _registry._active:
        return []
    return [(_root_of(walk.objects[n]), [n]) for n in held_by_it]


def held_by_threads(walk: Walk, held: list[int], named: list[Rooted]) -> list[Rooted]:
    """Return a root for each other thread that has some of `held` as its arguments or as variables.

    The functions that only pass on a call, such as those which feed a queue, are no roots of the walk's. The stack of a
    thread has its arguments as well. A thread that is a root among `named` gets no other, but has these, too.
    """
    roots = {n: own for root, own in named if root.thread for n in own}
    numbers, more = {id(walk.objects[n]): n for n in held}, list[Rooted]()
    variables = _variables() if numbers else {}
    for ident, thread in list(_registry._active.items()) if numbers else ():
        if ident != threading.get_ident():
            arguments = attribute_of(thread, "_args")
            own = sorted(numbers.pop(key) for key in {id(arguments), *variables.get(ident, ())} & numbers.keys())
            known = roots.get(walk.number.get(id(thread), -1))
            if known is not None:
                known += own
            elif own:
                more.append((_root_of(thread), own))
    return more


def _variables() -> dict[int, set[int]]:
    """Return the ids of the values of variables in such functions, by the thread that runs them."""
    found: dict[int, set[int]] = {}
    for ident, frame in running_frames():
        if not is_of_interest(frame):
            found.setdefault(ident, set()).update(map(id, frame_locals(frame).values()))
    return found


def _root_of(thread: Any) -> LiveRoot:
    name = str(object.__getattribute__(thread, "_name"))  # its dict, once it is made, would stand between it and its attributes
    line = f"import threading; [(t.cancel(), t.join()) for t in threading.enumerate() if t.name == {name!r}];"
    is_timer = type(thread) is threading.Timer
    what = "waits until its time comes" if is_timer else "runs"
    ended_by = line if is_timer else _own_end(attribute_of(thread, "_target"))
    return LiveRoot(kind="library", label=f"thread {name}", objects=(), what=what, thread=name, ended_by=ended_by)


def _own_end(function: Any) -> str:
    """Return the line that its library has against a thread which runs this function for ever; empty without one."""
    is_plain = type(function) is types.FunctionType
    return emptied_by().get((str(function.__module__), str(function.__name__)), "") if is_plain else ""


# --- Names from referrers.


_GLOBAL = "global of a library"
_NOT_FOLLOWED = "held in a way that is not followed"


def name_by_referrers(region: Region, held: list[int], in_use: Set[int] = frozenset()) -> tuple[list[Rooted], list[int]]:
    """Follow holders upwards, the nearest first; return the roots that could be named and the other objects held outside.

    A root's object may be known by many names, of which the first is taken. No holder of the points `in_use` is looked for.
    """
    search = _Search(region, held, in_use)
    search.run()
    named = _needed(region, search.named, in_use)
    unknown = region.pointing(search.held, entered_by(region.walk, named), in_use)
    named = [*named, *held_by_threads(region.walk, sorted(unknown), named)]
    entered = entered_by(region.walk, named)
    return named, [n for n in search.held if n not in entered]


class _Search:
    """A search upwards for holders that have a name."""

    def __init__(self, region: Region, held: list[int], in_use: Set[int]) -> None:
        self.named: list[Rooted] = []
        self.held = held
        self._region = region
        self._walk = region.walk
        self._in_use = in_use
        self._entered = set[int]()  # objects of named roots
        self._classes: list[Any] = []  # classes that code made while it ran, and below their roots in the same order
        self._of_classes: list[Rooted] = []
        self._modules = {id(space): name for name, space in self._walk.kinds.modules.items()} | self._walk.shell
        self._holders = Holders(self._walk, self._modules)

    def run(self) -> None:
        """Take steps until each object that matters has a name, or the holders or the time for it run out."""
        walk, asked = self._walk, set[int]()
        lowest = len(walk.objects)
        self._take_in_classes()
        while True:
            held = self._region.pointing(self.held, self._entered, self._in_use)
            asking = {id(walk.objects[n]): n for n in sorted(held) if n not in asked}
            if not asking or not self._holders.find(asking):
                break
            asked.update(asking.values())
            self._step(asking)
            for n in range(lowest, len(walk.objects)):  # holders may hold holders that were found after them
                _note_references(walk, n)
            self._region.extend()
            self.held = self._region.held()
        self._holders.clear()
        self._name_classes()

    def _step(self, asking: Mapping[int, int]) -> None:
        """Find the holders of the objects with these ids, name the roots among them, and add the others to the walk."""
        walk, roots, new = self._walk, list[Rooted](), len(self._walk.objects)
        for holder in self._holders:
            held_by_it = [asking[id(child)] for child in gc.get_referents(holder) if id(child) in asking]
            if id(holder) in walk.places:
                held_by_it = [n for n in held_by_it if n not in walk.entries]
            if held_by_it and not _is_in_use(self._region, holder, held_by_it):
                roots += self._roots_of(holder, held_by_it)
            del holder
        for frame in self._holders.callers(new):
            if id(frame) not in walk.number:
                walk.add_unwalked(frame)
            del frame
        self._holders.let_go()
        self._name(sorted(roots, key=lambda rooted: _foreign(walk, *rooted)))

    def _roots_of(self, holder: Any, held_by_it: list[int]) -> list[Rooted]:
        """Return the roots that `holder` is. One without a name joins the walk, and a class that was made is named last."""
        if self._modules.get(id(holder)) is None and (threads := threads_of(self._walk, holder, held_by_it)):
            return threads
        root = _named_root(self._region, holder, held_by_it, self._modules)
        if root is not None and not (root.is_class and not root.module):
            return [(root, held_by_it)]
        if root is None and id(holder) not in self._walk.number:
            self._walk.add_unwalked(holder)
        elif root is not None and id(holder) not in self._walk.number and id(holder) not in map(id, self._classes):
            self._classes.append(holder)
            self._of_classes.append((root, held_by_it))
        return []

    def _name(self, roots: Iterable[Rooted]) -> None:
        for root, entries in roots:
            if self._region.pointing(entries, self._entered, self._in_use):
                self.named.append((root, entries))
                self._entered |= entered_by(self._walk, [(root, entries)])

    def _take_in_classes(self) -> None:
        """Add the classes that were made for held objects and refer to them to the walk, as each step up is a whole pass."""
        walk, first = self._walk, len(self._walk.objects)
        held = {id(walk.objects[n]) for n in self.held}
        classes = []
        for n in {id(type(walk.objects[n])): n for n in self.held if _is_made(walk, type(walk.objects[n]))}.values():
            classes.append(type(walk.objects[n]))
            parts = _parts_of_class(classes[-1])
            if held.isdisjoint(id(ref) for part in parts for ref in gc.get_referents(part)):
                classes.pop()
            else:
                for part in parts:
                    if id(part) not in walk.number:
                        walk.add_unwalked(part)
                    del part
            del parts
        if classes:
            for n in range(first, len(walk.objects)):
                _note_references(walk, n)
            _link_classes(walk, [classes[n] for n in _classes_of_their_objects(walk, classes)])
            self._region.extend()
            self.held = self._region.held()

    def _name_classes(self) -> None:
        """Name the classes that more refers to than themselves and their objects; the others go with these."""
        own = _classes_of_their_objects(self._walk, self._classes)
        _link_classes(self._walk, [self._classes[n] for n in own])
        if own:
            self._region.extend()
            self.held = self._region.held()
        self._name(rooted for number, rooted in enumerate(self._of_classes) if number not in own)


def _is_made(walk: Walk, cls: type) -> bool:
    """Say whether a class of a library was made while the code ran, so that its module does not have it."""
    module = sys.modules.get(str(namespace_of(cls).get("__module__")))
    space = module_namespace(module) if module is not None else None
    return not walk.referents.is_users_class(cls) and (space is None or space.get(name_of(cls)) is not cls)


_PARTS = Types((property, classmethod, staticmethod, tuple, types.FunctionType, types.CellType))
_MOST_PARTS = 500


def _parts_of_class(cls: type) -> list[Any]:
    """Return the attributes of a class, the functions of its properties, and their closures."""
    parts = {id(ref): ref for ref in gc.get_referents(cls) if type(ref) is dict}
    todo = list(parts.values())
    while todo and len(parts) < _MOST_PARTS:
        new = {id(ref): ref for ref in gc.get_referents(todo.pop()) if type(ref) in _PARTS and id(ref) not in parts}
        parts |= new
        todo += new.values()
    return list(parts.values())


def _note_references(walk: Walk, number: int) -> None:
    below = (walk.number.get(id(ref), -1) for ref in gc.get_referents(walk.objects[number]))  # no list of ours may stay:
    walk.children[number] = [at for at in below if at >= 0]  # it would count as a holder


def _classes_of_their_objects(walk: Walk, classes: list[Any]) -> list[int]:
    """Return the places of the classes that go with their objects, as nothing refers to them but themselves and these."""
    found = referrers_of(classes) if classes else []
    ours = references_by_asking()
    own = []
    for n in range(len(classes)):  # no name of ours may refer to a class
        parts = {id(ref) for ref in _with_attributes(classes[n])}
        known = sum(
            sum(ref is classes[n] for ref in gc.get_referents(obj))
            for obj in found
            if id(obj) in parts or type(obj) is KeptTypes or (type(obj) is classes[n] and id(obj) in walk.number)
        )
        if sys.getrefcount(classes[n]) == ours + known:
            own.append(n)
    return own


def _with_attributes(cls: type) -> list[Any]:
    """Return the objects that a class refers to, and its attributes: the descriptors of `__dict__` and `__weakref__`, too."""
    refs = gc.get_referents(cls)
    return [*refs, *(value for space in refs if type(space) is dict for value in gc.get_referents(space))]


def _link_classes(walk: Walk, classes: list[Any]) -> None:
    """Add classes to the walk below their objects, which have the references of their class, too.

    `torch.nn.utils.parametrize` makes one for a module, whose property refers to the module.
    """
    objects: dict[int, list[int]] = {id(cls): [] for cls in classes}
    for n, obj in enumerate(walk.objects):
        if id(type(obj)) in objects:
            objects[id(type(obj))].append(n)
    for cls in classes:
        walk.add_unwalked(cls)
        number = walk.number[id(cls)]
        _note_references(walk, number)
        for at in objects[id(cls)]:
            walk.children[at].append(number)


def _needed(region: Region, named: list[Rooted], in_use: Set[int]) -> list[Rooted]:
    """Return the roots without those that lead to points by another one's objects alone.

    Each was named before the later steps. The globals of a hundred modules are loggers, which have the one registry of
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


def _is_in_use(region: Region, holder: Any, held_by_it: list[int]) -> bool:
    """Say whether a holder is in use itself, and the walk knows that it has these objects.

    If the search before met it as a holder of something else, the walk knows these objects of it from here on.
    """
    number = region.walk.number.get(id(holder), region.known)
    if number < region.known and number in region.walk.unwalked:
        known = set(region.walk.children[number])
        region.walk.children[number] += [n for n in held_by_it if n not in known]  # each as often as it is referred to
        region.take_in(number)
    return number < region.known and set(held_by_it) <= set(region.walk.children[number])


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


def _named_root(region: Region, holder: Any, held_by_it: list[int], modules: dict[int, str]) -> LiveRoot | None:
    """Return the root that `holder` is, or None where the search goes on."""
    label, what, module = _name_of_root(region, holder, held_by_it, modules)
    if not label:
        return None
    return LiveRoot(
        kind="library",
        label=label,
        objects=(),
        what=what,
        module=module,
        is_class=region.walk.kinds.of(type(holder)) == "class",
        ended_by=_unbinding(region.walk, label, module, held_by_it) if what == _GLOBAL else "",
    )


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
    if walk.number.get(id(holder), region.known) < region.known:
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
    if own := emptied_by().get((module, label.removeprefix(f"{module}."))):
        return own
    cls = type(walk.objects[held_by_it[0]])
    if len(held_by_it) == 1 and (own := emptied_by().get((str(namespace_of(cls).get("__module__")), name_of(cls)))):
        return own
    is_thing = len(held_by_it) == 1 and walk.kind[held_by_it[0]] in EXPERIMENT_KINDS | {"tensor"}
    return f"import {module}; {label} = None" if module and is_thing else ""


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


def other_holders(walk: Walk, roots: list[Rooted], names: Set[str]) -> list[Rooted]:
    """Return a root for each holder of an object that names lead to, where the walk has not met it.

    None where part of the heap was left out, as its references cannot be told from others'. Objects of `names`, and those that
    `roots` of running code and of registries lead to, are in use anyway, so that other holders don't matter.
    """
    if walk.rest is not None:
        return []
    region = Region(walk, named=True)
    held = region.held()
    if not held:
        return []
    used = [entries for root, entries in roots if root.kind in ("frame", "library") or root.label in names]
    in_use = region.points(n for entries in used for n in entries)
    named, held = name_by_referrers(region, held, in_use)
    hooks = lead_to_hooks(walk, dicts_of_hooks(walk, held), len(walk.objects))
    unknown = sorted(region.pointing(set(held) - hooks, entered_by(walk, named), in_use))
    return [*named, *unnamed_roots(walk, unknown)]
