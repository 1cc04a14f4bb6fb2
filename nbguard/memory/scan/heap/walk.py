"""The heap, walked once from every root to find the objects that lead to a tracked storage, and their references.

The walk holds objects strongly while it runs and drops them when it returns; it hands out numbers, names, and weak references
to storages and experiments, to check later which are really gone.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, TypeVar

from nbguard.memory.core.facts import KEPT_KINDS, StorageFact, UnreadFact
from nbguard.memory.core.references.graph import upwards
from nbguard.memory.scan import progress
from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.graphs import Graphs
from nbguard.memory.scan.heap.kinds import (
    LEAF,
    Kinds,
    Types,
    TypeTable,
    Unwalked,
    module_namespace,
    mro_of,
    name_of,
    namespace_of,
    never_asked,
)
from nbguard.memory.scan.libraries import library_paths

# --- References of an object, as far as Python, numpy and torch can tell them without running a line of the user's code.


_BULK = 64
"""Containers with at least so many references are first asked, in one go, whether they hold anything but plain data."""

_PLAIN_TYPES = Types((dict, list, tuple, set, frozenset))
_PIECE = 4096
_ROOM = 200  # objects behind each of a piece, on average, that are looked through in this way
_SKIPPED = (LEAF, "class")
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made in Python
_flags = type.__dict__["__flags__"].__get__


class Referents:
    """Lists the objects that an object refers to. One instance serves one scan of the heap."""

    def __init__(self, kinds: Kinds, has_torch: bool) -> None:
        self.kinds = kinds
        self.autograd: Autograd | None = Autograd() if has_torch else None
        self._plain = TypeTable(partial(_is_plain, kinds))
        self._user_modules: dict[object, bool] = {"__main__": True}
        self._libraries = library_paths()
        self._expand: dict[str, Callable[[Any], list[Any]]] = {
            "array": _array,
            "part of an array": _part_of_an_array,
            "storage": lambda _: [],
        }
        if self.autograd is not None:
            self._expand |= {"tensor": self.autograd.tensor_referents, "graph": self.autograd.graph_referents}

    def of(self, obj: Any, kind: str) -> list[Any]:
        """Return the objects that `obj`, of this kind, refers to; none for a large container of plain data."""
        expand = self._expand.get(kind)
        if expand is not None:
            return expand(obj)
        referents = gc.get_referents(obj)
        return [] if len(referents) >= _BULK and type(obj) in _PLAIN_TYPES and self._all_plain(referents) else referents

    def is_users_class(self, cls: type) -> bool:
        """Say whether a class is the user's own, so that its attributes count as held by the user."""
        return self._is_users(namespace_of(cls).get("__module__"))

    def is_users_function(self, obj: object) -> bool:
        """Say whether `obj` is a function or method of the user's own, or an instance of a class of the user's."""
        while type(obj) is types.MethodType:
            obj = obj.__func__
        return self._is_users(obj.__module__) if type(obj) is types.FunctionType else self.is_users_class(type(obj))

    def _is_users(self, module_name: object) -> bool:
        if type(module_name) is not str:
            return False
        known = self._user_modules.get(module_name)
        if known is None:
            known = self._user_modules[module_name] = self.is_users_module(sys.modules.get(module_name))
        return known

    def is_users_module(self, module: object) -> bool:
        """Say whether a module is the user's own: a file outside the installed libraries."""
        return self.is_users_file((module_namespace(module) or {}).get("__file__"))

    def is_users_file(self, path: object) -> bool:
        """Say whether a module with this `__file__` is the user's own."""
        return type(path) is str and not path.startswith(self._libraries)

    def _all_plain(self, objects: list[Any]) -> bool:
        """Say whether everything below `found` is plain data (numbers, text, containers and simple instances of them).

        With C-speed calls, some 50 ns an object instead of a Python loop, and in pieces that stay in the processor's cache.
        """
        return all(self._plain_below(objects[at : at + _PIECE]) for at in range(0, len(objects), _PIECE))

    def _plain_below(self, level: list[Any]) -> bool:
        allowed = _ROOM * (len(level) + _BULK)
        while (allowed := allowed - len(level)) > 0:
            types = list(map(type, level))
            distinct = self._plain.note(types)
            if not all(map(self._plain.__getitem__, distinct)):
                return False
            containers = {key for key in distinct if self.kinds.known[key] not in _SKIPPED}
            if not containers:
                return True
            some = containers < distinct
            inside = list(compress(level, map(containers.__contains__, map(id, types)))) if some else level
            if len(set(map(id, inside))) < len(inside):  # something is shared: go into it once
                inside = list({id(obj): obj for obj in inside}.values())
            level = gc.get_referents(*inside)
            if not level:
                return True
        return False  # so much behind so little, or a cycle: looked into object by object


def _is_plain(kinds: Kinds, cls: type) -> bool:
    kind = kinds.of(cls)
    simple = kind == "object" and (
        cls in _PLAIN_TYPES or (bool(_flags(cls) & _HEAP_TYPE) and "__del__" not in namespace_of(cls))
    )
    return kind in _SKIPPED or simple


def _array(array: Any) -> list[Any]:
    """Return an array's base and, where it holds objects, its elements. numpy keeps both out of gc's sight."""
    numpy: Any = sys.modules["numpy"]
    base = numpy.ndarray.__dict__["base"].__get__(array)
    referents = [] if base is None else [base]
    if base is None and numpy.ndarray.__dict__["dtype"].__get__(array).hasobject:
        referents.append(numpy.ndarray.tolist(array))
    return referents if numpy.ndarray is type(array) else referents + gc.get_referents(array)


def _part_of_an_array(part: Any) -> list[Any]:
    """Return the arrays behind a record of one (`table[3]`) or an iterator over some."""
    numpy: Any = sys.modules["numpy"]
    for cls, name in ((numpy.void, "base"), (numpy.flatiter, "base"), (numpy.nditer, "operands")):
        if cls in mro_of(type(part)):
            try:
                return [cls.__dict__[name].__get__(part)]
            except ValueError:  # an iterator that has been closed
                return []
    return []


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
        self.referents: Referents = Referents(kinds, "torch" in sys.modules)
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
        self._number(obj, self.kinds.of(type(obj)))
        self.children.append([])

    def run(self) -> None:
        """Look into every numbered object not visited yet, and into its referents."""
        objects, kinds, number, stop = self.objects, self.kind, self.number, self.stop
        kind_of, known = self.kinds.of, self.kinds.known
        has_graph = self.referents.autograd.has_graph if self.referents.autograd is not None else bool
        library_classes: set[int] = set()  # by id: nearly every object refers to its class
        skipped = len(self.skipped)
        at = len(self.children)
        while at < len(objects) or self._walk_graphs():
            if at % _OFTEN == 0:
                progress.report(len(objects))
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
            if kind in ("tensor", "storage"):
                self.unread.read(obj, partial(self._note_storage, at, kind), otherwise=None)
            if kind == "graph" or (kind == "tensor" and has_graph(obj)):
                self._with_graph.append(at)
            if len(self.skipped) > skipped:
                skipped = len(self.skipped)
                self._cut(at)
            at += 1

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
    """Return the ids of objects that no walk looks into: the globals of all modules, and asyncio's own."""
    return {id(never_asked()), *map(id, kinds.modules.values())}


def references_by_asking() -> int:
    """Return the count that `sys.getrefcount(objects[n])` itself makes: the list's own reference and the call's."""
    probe = [object()]
    return sys.getrefcount(probe[0])


def weak_storage(storage: Any) -> Any:
    """Return torch's own weak reference to a storage, or None where this torch has none."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    return None if reductions is None else reductions.StorageWeakRef(storage)
