"""References of an object, as far as Python, numpy and torch can tell them without running a line of the user's code."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Collection, Container
from functools import partial
from itertools import compress
from typing import Any

from nbguard.memory.scan.heap import native
from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.kinds import LEAF, Kinds, Types, TypeTable, module_namespace, mro_of, namespace_of
from nbguard.memory.scan.libraries import library_paths

_BULK = 64
"""Containers with at least so many references are first asked, in one go, whether they hold anything but plain data."""

_PLAIN_TYPES = Types((dict, list, tuple, set, frozenset))
_PIECE = 4096
_ROOM = 200  # objects behind each of a piece, on average, that are looked through in this way
_SKIPPED = (LEAF, "class")
_OF_CLASSES = Types((property, classmethod, staticmethod))
_MOST_OF_A_CLASS = 5_000
"""Objects below a class that are looked through."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made in Python
_flags = type.__dict__["__flags__"].__get__


class Referents:
    """Lists the objects that an object refers to. One instance serves one scan of the heap."""

    def __init__(self, kinds: Kinds, has_torch: bool, stop: Container[int] = ()) -> None:
        """`stop`: ids of objects that the walk does not look into."""
        self.kinds = kinds
        self._stop = stop
        self.autograd: Autograd | None = Autograd() if has_torch else None
        self._plain = TypeTable(partial(_is_plain, kinds))
        self._dull_classes: dict[int, bool] = {}
        self._user_modules: dict[object, bool] = {"__main__": True}
        self._libraries = library_paths()
        self._expand: dict[str, Callable[[Any], list[Any]]] = {
            "array": _array,
            "part of an array": _part_of_an_array,
            "storage": lambda _: [],
        }
        if self.autograd is not None:
            self._expand |= {
                "tensor": self.autograd.tensor_referents,
                "graph": self.autograd.graph_referents,
                "script": _scripted_tensors,
            }

    @property
    def special_kinds(self) -> Collection[str]:
        """Return the kinds of objects whose referents Python's garbage collector does not know, or not all."""
        return self._expand.keys()

    def of(self, obj: Any, kind: str) -> list[Any]:
        """Return the objects that `obj`, of this kind, refers to; none for a large container of plain data."""
        expand = self._expand.get(kind)
        if expand is not None:
            return expand(obj)
        referents = list(obj.values()) if has_values_of_an_object(obj) else gc.get_referents(obj)
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

    def is_dull_class(self, cls: type) -> bool:
        """Say whether a class is a library's, or leads to plain data and code alone: then its instances may be plain data."""
        known = self._dull_classes.get(id(cls))
        if known is None:
            known = self._dull_classes[id(cls)] = not self.is_users_class(cls) or self._leads_to_code_alone(cls)
        return known

    def _leads_to_code_alone(self, cls: type) -> bool:
        seen, todo = {id(cls)}, [cls]
        while todo and len(seen) < _MOST_OF_A_CLASS:
            for child in gc.get_referents(todo.pop()):
                kind, key = self.kinds.of(type(child)), id(child)
                if kind is LEAF or key in seen or key in self._stop or (kind == "class" and not self.is_users_class(child)):
                    continue
                if kind not in ("class", "code", "cell") and type(child) not in _OF_CLASSES and not self._plain.of(type(child)):
                    return False
                seen.add(key)
                todo.append(child)
        return not todo

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
            metaclasses = {key for key in distinct if self.kinds.known[key] == "class"}
            if metaclasses:
                classes = list(compress(level, map(metaclasses.__contains__, map(id, types))))
                if not all(map(self.is_dull_class, dict(zip(map(id, classes), classes, strict=True)).values())):
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


# --- The same by the compiled part, which is asked about each type once.


_WAYS = {"leaf": 0, "class": 1, "object": 2, "plain": 3, "bulk": 4, "special": 5, "tensor": 6}
"""The `enum way` of _heapwalk.c."""


def walker(referents: Referents) -> Any:
    """Return a compiled walker that lists the same referents, or None where Python walks."""
    if native.compiled is None:
        return None
    way = partial(_way, referents.kinds.known, referents.special_kinds, TypeTable(partial(_is_plain, referents.kinds)))
    return native.compiled.Walker(way, referents.is_users_class, referents.is_dull_class, _BULK, _ROOM)


def _way(known: TypeTable[str], special: Container[str], plain: TypeTable[bool], cls: type) -> tuple[int, str]:
    kind = known.of(cls)
    if kind is LEAF or kind in ("class", "tensor"):
        return _WAYS[kind], kind
    way = "special" if kind in special else "bulk" if cls in _PLAIN_TYPES else "plain" if plain.of(cls) else "object"
    return _WAYS[way], kind


def _is_plain(kinds: Kinds, cls: type) -> bool:
    kind = kinds.of(cls)
    simple = kind == "object" and (
        cls in _PLAIN_TYPES or (bool(_flags(cls) & _HEAP_TYPE) and "__del__" not in namespace_of(cls))
    )
    return kind in _SKIPPED or simple


def has_values_of_an_object(obj: Any) -> bool:
    """Say whether an object is `vars(owner)` of an owner that keeps the values itself, as objects do from Python 3.13 on.

    The collector sees such values behind the owner alone. When the owner goes, they become the dict's.
    """
    return type(obj) is dict and bool(obj) and not gc.get_referents(obj)


def _array(array: Any) -> list[Any]:
    """Return an array's base and, where it holds objects, its elements. numpy keeps both out of gc's sight."""
    numpy: Any = sys.modules["numpy"]
    base = numpy.ndarray.__dict__["base"].__get__(array)
    referents = [] if base is None else [base]
    if base is None and numpy.ndarray.__dict__["dtype"].__get__(array).hasobject:
        referents.append(numpy.ndarray.tolist(array))
    return referents if numpy.ndarray is type(array) else referents + gc.get_referents(array)


def _scripted_tensors(tensors: Any) -> list[Any]:
    """Return the parameters or buffers that a module of TorchScript has in C++."""
    return [tensor for _, tensor in type(tensors).items(tensors)]


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
