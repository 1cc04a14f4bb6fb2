"""The heap, walked once from every root to find the objects that lead to a tracked storage, and their references.

The walk holds objects strongly while it runs and drops them when it returns; it hands out numbers, names, and weak references
to storages and experiments, to check later which are really gone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from nbguard.memory.core.facts import KEPT_KINDS, StorageFact, UnreadFact
from nbguard.memory.core.references.graph import upwards
from nbguard.memory.scan import progress
from nbguard.memory.scan.heap.graphs import Graphs
from nbguard.memory.scan.heap.kinds import (
    LEAF,
    Kinds,
    Unwalked,
    name_of,
    never_asked,
)
from nbguard.memory.scan.heap.referents import Referents, walker

# --- Objects of a scan that refuse to be read; each costs its own row, never the scan.


_Read = TypeVar("_Read")


class Unread:
    """Counts the objects that could not be read, each once."""

    def __init__(self) -> None:
        self._types: dict[int, str] = {}  # names of the objects' types, by the objects' ids

    def note(self, obj: object) -> None:
        """Count an object."""
        self._types[id(obj)] = name_of(type(obj))

    def read(self, obj: Any, read: Callable[[Any], _Read], otherwise: _Read) -> _Read:
        """Return the result of `read` on an object; where it fails, count the object and return `otherwise`."""
        try:
            return read(obj)
        except Exception:  # noqa: BLE001 - whatever is odd about one object must not cost the look
            self.note(obj)
            return otherwise

    @property
    def facts(self) -> tuple[UnreadFact, ...]:
        """Return the number of objects of each type, the most first."""
        return tuple(UnreadFact(name, count) for name, count in Counter(self._types.values()).most_common())


_CANDIDATES = KEPT_KINDS | {"tensor"}

_NOTED = frozenset({"tensor", "storage", "graph"})
_OFTEN = 4096
MOST_TENSORS = 25_000
"""Tensors that a walk from the user's names looks into: some 20 µs and 1 KiB each."""
MORE_TENSORS = 2_500
"""More of them that only stale roots lead to, and as many again that no root leads to."""


@dataclass
class WeakTracker:
    """Weak references that tell later which objects are gone: storages by number, experiments by the id they had.

    `tensors`, where asked for, are those met on each storage; None stands for another thing that shares it. Then `exported`
    are the numbers of the storages that something outside Python may point into.
    """

    storages: list[Any] = field(default_factory=list)
    objects: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    tensors: dict[int, list[weakref.ref[Any] | None]] | None = None
    exported: set[int] = field(default_factory=set)

    def note(self, obj: Any) -> None:
        """Remember an experiment weakly, by its id."""
        with contextlib.suppress(TypeError):  # a class without weak references
            self.objects[id(obj)] = weakref.ref(obj)

    def expired(self) -> set[int]:
        """Return the numbers of the storages whose memory has been freed."""
        return {number for number, ref in enumerate(self.storages) if ref is not None and ref.expired()}


class Walk:
    """One walk. Objects are numbered in the order of their first sight."""

    def __init__(self, tracked: str, stop: Iterable[int], kinds: Kinds) -> None:
        """`stop`: ids of objects that the walk does not look into, such as those of `never_walked`."""
        self.tracked = tracked
        self.stop: set[int] = set(stop)
        self.kinds = kinds
        self.kinds.known[id(Unwalked)] = "graph"
        self.referents: Referents = Referents(kinds, "torch" in sys.modules, self.stop)
        self._compiled: Any = walker(self.referents)
        self.graphs: Graphs | None = None if self.referents.autograd is None else Graphs(self.referents.autograd, kinds)
        self.rest: int | None = None  # number of the object that stands for all that the walk left out
        self.skipped: list[Any] = []  # tensors that the walk left out
        self.tensors: int = 0
        self.most_tensors = MOST_TENSORS
        self.follows_graphs = True
        self._with_graph: list[int] = []  # tensors and nodes whose graphs are to be walked
        self._later: dict[int, list[int]] = {}  # further references of objects, until these are walked
        self.objects: list[Any] = []
        self.kind: list[str] = []
        self.children: list[list[int]] = []
        self.number: dict[int, int] = {}
        self.storage_keys: dict[tuple[str, int], int] = {}
        self.storages: list[StorageFact] = []
        self.holds: dict[int, list[int]] = {}
        self.tracker: WeakTracker = WeakTracker()
        self.unread: Unread = Unread()
        self.parked: Collection[int] = ()  # addresses of storages that do not count
        self.unwalked: set[int] = set()  # numbers of the objects whose references are known in part: `add_unwalked`
        self.only_stale: range = range(0)  # numbers of the objects that only stale roots lead to
        self.entries: dict[int, int | None] = {}  # objects that stale roots refer to, and how often; None if unknown
        self.places: set[int] = set()  # ids of the containers that hold these entries for the roots
        self.class_spaces: set[int] = set()  # ids of the dicts that are the attributes of a library's classes
        self.shell: dict[int, str] = {}  # by id of a dict of the shell's attributes: the shell as one writes it

    def add(self, obj: Any) -> int | None:
        """Number `obj`; None if it is never looked into."""
        kind = self.kinds.of(type(obj))
        if kind is LEAF or id(obj) in self.stop or (kind == "class" and not self.referents.is_users_class(obj)):
            return None
        return self._number(obj, kind)

    def _number(self, obj: Any, kind: str) -> int:
        key = id(obj)
        number = self.number.get(key)
        if number is None:
            self.tensors += kind == "tensor"
            number = self.number[key] = len(self.objects)
            self.objects.append(obj)
            self.kind.append(kind)
        return number

    def add_as_many_as_may_be(self, objects: list[Any]) -> None:
        """Number objects that no root has led to; tensors only as long as there are not too many."""
        tensors = [obj for obj in objects if self.kinds.of(type(obj)) == "tensor"]
        self.skipped += tensors[max(0, self.most_tensors - self.tensors) :]
        left_out = set(map(id, tensors[max(0, self.most_tensors - self.tensors) :]))
        for obj in objects:
            if id(obj) not in left_out:
                self.add(obj)
        if left_out and self.rest is None:
            self.rest = self._number(Unwalked(), "graph")

    def add_unwalked(self, obj: Any) -> None:
        """Number `obj` without looking into it: the caller fills its references in."""
        self.unwalked.add(self._number(obj, self.kinds.of(type(obj))))
        self.children.append([])

    def run(self) -> None:
        """Look into every numbered object not visited yet, and into its referents."""
        objects, kinds, number, stop = self.objects, self.kind, self.number, self.stop
        kind_of, known = self.kinds.of, self.kinds.known
        library_classes: set[int] = set()  # by id: nearly every object refers to its class
        skipped = len(self.skipped)
        at = len(self.children)
        while at < len(objects) or self._walk_graphs():
            if at % _OFTEN == 0:
                progress.report(len(objects))
            if self._compiled is not None and (went_to := self._follow()) > at:
                at = went_to
                continue
            obj, kind = objects[at], kinds[at]
            children = self._later.pop(at, [])
            try:
                referents = self.referents.of(obj, kind) if at != self.rest else []
            except Exception:  # noqa: BLE001 - as in `Unread.read`, without a call for each object
                self.unread.note(obj)
                referents = gc.get_referents(obj)
            for child in referents:
                cls = type(child)
                child_kind = known.get(id(cls)) or kind_of(cls)
                if child_kind is LEAF:
                    continue
                key = id(child)
                known_number = number.get(key)
                if known_number is None:
                    if key in stop or key in library_classes:
                        continue
                    if child_kind == "class" and not self.referents.is_users_class(child):
                        library_classes.add(key)
                        continue
                    if child_kind == "tensor":
                        if self.tensors >= self.most_tensors:
                            self.skipped.append(child)
                            continue
                        self.tensors += 1
                    known_number = number[key] = len(objects)
                    objects.append(child)
                    kinds.append(child_kind)
                children.append(known_number)
            self.children.append(children)
            if kind in _NOTED:
                self._note(at, kind, obj)
            if len(self.skipped) > skipped:
                skipped = len(self.skipped)
                self._cut(at)
            at += 1

    def _note(self, at: int, kind: str, obj: Any) -> None:
        """Note the storage of an object, and that its graph is to be walked."""
        if kind != "graph":
            self.unread.read(obj, partial(self._note_storage, at, kind), otherwise=None)
        autograd = self.referents.autograd
        if kind == "graph" or (kind == "tensor" and autograd is not None and autograd.has_graph(obj)):
            self._with_graph.append(at)

    def _follow(self) -> int:
        """Look into objects by the compiled part, as `run` does, up to one that Python must; return its number."""
        until = len(self.children) // _OFTEN * _OFTEN + _OFTEN
        room = self.most_tensors - self.tensors
        so_far = (self.objects, self.kind, self.number, self.children)
        self.tensors += self._compiled.follow(so_far, self.stop, self._later, until, room)
        return len(self.children)

    def _walk_graphs(self) -> bool:
        """Walk the graphs of the objects met since the last time; say whether there is anything more to look into."""
        graphs, waiting = self.graphs, self._with_graph
        self._with_graph = []
        for number in waiting:
            assert graphs is not None
            if number == self.rest:
                continue
            if not self.follows_graphs:
                self._cut(number)
                continue
            node = self.objects[number]
            if self.kind[number] == "tensor":
                node = graphs.root_of(node)
                if node is None:
                    self._cut(number)
                    continue
                self._link(number, node)
            graphs.walk(node, self._link_nodes, self._cut_at)
        return len(self.children) < len(self.objects)

    def _link(self, parent: int, child: Any) -> None:
        """Note that an object refers to another one, looked into or not."""
        number = self._number(child, self.kinds.of(type(child)))
        if parent < len(self.children):
            self.children[parent].append(number)
        else:
            self._later.setdefault(parent, []).append(number)

    def _link_nodes(self, node: Any, before: Any) -> None:
        self._link(self._number(node, "graph"), before)

    def _cut_at(self, node: Any) -> None:
        self._cut(self._number(node, "graph"))

    def _cut(self, number: int) -> None:
        """Note that the walk leaves out something behind an object."""
        if self.rest is None:
            rest = Unwalked()
            self.rest = self._number(rest, "graph")
        self._link(number, self.objects[self.rest])

    def _note_storage(self, at: int, kind: str, obj: Any) -> None:
        autograd = self.referents.autograd
        assert autograd is not None
        try:
            storage = obj if kind == "storage" else autograd.storage(obj)
            device = str(storage.device)
            if device.partition(":")[0] != self.tracked:  # and a fake tensor is asked no further: it would make a real one
                return
            address, nbytes = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, AttributeError):  # sparse and wrapper tensors have no storage of their own
            parts = autograd.parts(obj) if kind == "tensor" else []
            self.children[at] += [self._number(part, "tensor") for part in parts]
            if not parts and kind == "tensor" and autograd.is_opaque(obj, self.tracked):
                self.unread.note(obj)
            return
        if not address or not nbytes:
            return
        if address in self.parked:
            return
        key = (device, address)
        if key not in self.storage_keys:
            self.storage_keys[key] = len(self.storages)
            self.storages.append(StorageFact(device, nbytes, address))
            self.tracker.storages.append(weak_storage(storage))
        self.holds.setdefault(at, []).append(self.storage_keys[key])
        if self.tracker.tensors is not None:
            ref = weakref.ref(obj) if kind == "tensor" else None
            self.tracker.tensors.setdefault(self.storage_keys[key], []).append(ref)

    def storage_of(self, tensor: Any) -> int | None:
        """Return the number of the storage that a tensor is on, None if the walk has not met it."""
        assert self.referents.autograd is not None
        try:
            storage = self.referents.autograd.storage(tensor)
            device = str(storage.device)
            is_tracked = device.partition(":")[0] == self.tracked  # a fake tensor is asked no further, as above
            return self.storage_keys.get((device, storage.data_ptr())) if is_tracked else None
        except (RuntimeError, AttributeError):  # sparse and wrapper tensors have no storage of their own
            return None

    def leading_to(self, goals: Iterable[int], first: int = 0, blocked: Collection[int] = ()) -> set[int]:
        """Return the objects from number `first` on that lead to one of `goals`, not through `blocked`."""
        parents: dict[int, list[int]] = {}
        for parent in range(first, len(self.children)):
            if parent not in blocked:
                for child in self.children[parent]:
                    parents.setdefault(child, []).append(parent)
        return upwards(parents, goals)

    def unreached(self) -> tuple[list[Any], list[Any]]:
        """Return the objects that gc tracks and no root has led to, in one pass: tensors and experiments; autograd nodes.

        Where tensors were left out, no root leads to them either: then it is experiments alone.
        """
        wanted = _CANDIDATES if not self.skipped else KEPT_KINDS
        unreached = [obj for obj in self.kinds.tracked({*wanted, "graph"}) if id(obj) not in self.number]
        nodes = [obj for obj in unreached if self.kinds.of(type(obj)) == "graph"]
        return [obj for obj in unreached if self.kinds.of(type(obj)) in wanted], nodes


def never_walked(kinds: Kinds) -> set[int]:
    """Return the ids of objects that no walk looks into, that is, the globals of all modules, and asyncio's own.

    So is the register of loggers, as each logger leads to it and by it to all others, whose things are not its own.
    """
    return {id(never_asked()), id(logging.root.manager), *map(id, kinds.modules.values())}


def references_by_asking() -> int:
    """Return the count that `sys.getrefcount(objects[n])` itself makes: the list's own reference and the call's."""
    probe = [object()]
    return sys.getrefcount(probe[0])


def made_for_array(walk: Walk, array: int) -> list[list[int]]:
    """Return an array of objects and, level by level, the lists and records made for it. The last level has its elements."""
    numpy: Any = sys.modules["numpy"]
    made: list[type] = [list] * numpy.ndarray.__dict__["ndim"].__get__(walk.objects[array])
    if numpy.ndarray.__dict__["dtype"].__get__(walk.objects[array]).names is not None:
        made.append(tuple)  # a record
    levels = [[array]]
    for cls in made:
        levels.append([child for at in levels[-1] for child in walk.children[at] if type(walk.objects[child]) is cls])
    return levels


def weak_storage(storage: Any) -> Any:
    """Return torch's own weak reference to a storage, or None where this torch has none."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    return None if reductions is None else reductions.StorageWeakRef(storage)
