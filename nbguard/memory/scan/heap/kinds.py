"""Kinds of objects, told by the type alone and remembered per type.

`isinstance` would run a proxy's `__class__`; reading the type's own slots through `type.__dict__` runs nothing. A type is no
key of a dict and no member of a set or tuple that is searched: a metaclass's own `__hash__` and `__eq__` would run.
"""

from __future__ import annotations

import contextvars
import dataclasses
import dis
import gc
import keyword
import math
import sys
import types
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, compress
from operator import is_not
from typing import Any, Final, Generic, TypeVar
from weakref import KeyedRef, ref

from nbguard.libraries import class_kinds
from nbguard.memory.scan.heap import native

_Known = TypeVar("_Known")

LEAF: Final = "leaf"
"""Kind of objects that are never looked into, such as atoms, library classes. A module leads nowhere: the walk stops at its
globals.
"""


class Unwalked:
    """The stand-in, in the walk, of all objects that one scan left out."""


_HAVE_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: objects without it cannot be asked for their referents
_mro = type.__dict__["__mro__"].__get__
_flags = type.__dict__["__flags__"].__get__
_namespace = type.__dict__["__dict__"].__get__
_name = type.__dict__["__name__"].__get__
_module_namespace = _namespace(types.ModuleType)["__dict__"].__get__

_BUILTIN: dict[type, str] = {
    types.CodeType: LEAF,
    types.GetSetDescriptorType: LEAF,
    types.MemberDescriptorType: LEAF,
    types.WrapperDescriptorType: LEAF,
    types.MethodDescriptorType: LEAF,
    types.ClassMethodDescriptorType: LEAF,
    types.FrameType: "frame",
    types.TracebackType: "traceback",
    BaseException: "traceback",
    types.CellType: "cell",
    types.FunctionType: "code",
    contextvars.ContextVar: "context",
    type: "class",
}

_BASE_CLASSES = (
    ("torch", "Tensor", "tensor"),
    ("torch", "UntypedStorage", "storage"),
    ("torch.nn", "Module", "model"),
    ("torch.optim", "Optimizer", "optimizer"),
    ("torch._C", "ParameterDict", "script"),  # of TorchScript, whose modules have their tensors in C++
    ("torch._C", "BufferDict", "script"),
    ("torch.utils.data", "DataLoader", "loader"),
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter", "iterator"),
    ("torch.cuda.graphs", "CUDAGraph", "pool"),
    ("torch.cuda.memory", "MemPool", "pool"),
    ("numpy", "ndarray", "array"),
    ("numpy", "flatiter", "part of an array"),
    ("numpy", "nditer", "part of an array"),
    ("numpy", "void", "part of an array"),
    ("pandas.core.generic", "NDFrame", "data"),
)
"""Classes of PyTorch and of data: (module, class, kind). Like those of `nbguard.libraries`, none is imported."""


_PIECE = 1 << 14
"""Objects that are examined at once: so many stay in the processor's cache."""


class Types(tuple[type, ...]):
    """Classes among which one is searched for by identity: `in` runs no metaclass's `__eq__`."""

    __slots__ = ()

    def __contains__(self, cls: object) -> bool:
        return id(cls) in map(id, self)


FRAMES = Types((types.FrameType, types.TracebackType))


class KeptTypes(list[type]):
    """Types that live as long as a table of ours, which is no holder of theirs."""


class TypeTable(dict[int, _Known], Generic[_Known]):
    """Findings about types, by their ids; each is examined once. The types live as long as the table.

    `classify` must not lead to the table: a cycle would keep the types, among them the user's, until the collector runs.
    """

    def __init__(self, classify: Callable[[type], _Known]) -> None:
        super().__init__()
        self._classify = classify
        self._types = KeptTypes()

    def of(self, cls: type) -> _Known:
        """Return the findings about a type."""
        known = self.get(id(cls))
        if known is None:
            known = self[id(cls)] = self._classify(cls)
            self._hold(cls)
        return known

    def _hold(self, cls: type) -> None:
        self._types.append(cls)

    def note(self, types: list[type]) -> set[int]:
        """Examine each of these types that is not known yet; return their ids, each once.

        Neighbours in the heap are mostly alike: only where the type changes is its id asked for.
        """
        changes = list(compress(types, map(is_not, types, chain((None,), types))))
        distinct = set(map(id, changes))
        if not distinct <= self.keys():
            for cls in dict(zip(map(id, changes), changes, strict=True)).values():
                self.of(cls)
        return distinct


class WeakTypeTable(TypeTable[_Known]):
    """The same for longer than a scan. It keeps no type alive, and forgets each when it goes."""

    def __init__(self, classify: Callable[[type], _Known]) -> None:
        super().__init__(classify)
        self._weak: dict[int, KeyedRef[int, type]] = {}
        table = ref(self)

        def forget(gone: KeyedRef[int, type]) -> None:
            if (known := table()) is not None:
                del known[gone.key], known._weak[gone.key]

        self._forget = forget

    def _hold(self, cls: type) -> None:
        self._weak[id(cls)] = KeyedRef(cls, self._forget, id(cls))


def namespace_of(cls: type) -> Any:
    """Return the class's own attributes (a read-only mapping), without going through its metaclass."""
    return _namespace(cls)


def mro_of(cls: type) -> Types:
    """Return the class's bases in order, without going through its metaclass."""
    return Types(_mro(cls))


def name_of(cls: type) -> str:
    """Return the class's name, without going through its metaclass."""
    return str.__str__(_name(cls))  # it may be of a subclass of str


def module_namespace(module: object) -> dict[str, Any] | None:
    """Return a module's globals, without going through a class of its own (lazy modules have one); None if it is no module."""
    return _module_namespace(module) if types.ModuleType in mro_of(type(module)) else None


def module_namespaces() -> dict[str, dict[str, Any]]:
    """Return the globals of every loaded module, by the module's name."""
    namespaces = {}
    for name, module in list(sys.modules.items()):
        cls = type(module)
        if cls is types.ModuleType or types.ModuleType in mro_of(cls):  # nearly all are of that class itself
            namespaces[name] = _module_namespace(module)
    return namespaces


def loaded_class(module: str, name: str) -> type | None:
    """Return a class of a module that is loaded; None if it is not, or has no such class."""
    loaded = sys.modules.get(module)
    base = None if loaded is None else loaded.__dict__.get(name)
    return base if type(base) is type or (base is not None and type in mro_of(type(base))) else None


def never_asked() -> Any:
    """Return the module that `gc.get_referents` must not be asked about: asyncio's own; None if it is not loaded.

    CPython 3.12.0 to 3.12.5 hands out objects that the module freed: the process hangs in its next garbage collection
    (github.com/python/cpython/issues/122695).
    """
    return sys.modules.get("_asyncio")


def is_graph_node(cls: type) -> bool:
    """Say whether a class is of nodes of autograd graphs."""
    return any(type(namespace_of(base).get("next_functions")) is types.GetSetDescriptorType for base in mro_of(cls))


def is_frozen(cls: type) -> bool:
    """Say whether a class is a frozen dataclass, or frozen by attrs, so that its objects keep their attributes."""
    space = next(namespace_of(base) for base in mro_of(cls) if "__delattr__" in namespace_of(base))
    params, deletes = space.get("__dataclass_params__"), space["__delattr__"]
    if type(params) is dataclasses._DataclassParams:  # type: ignore[attr-defined]
        return bool(params.frozen)
    return type(deletes) is types.FunctionType and deletes.__module__ == "attr._make"


def keeps_entries(cls: type) -> bool:
    """Say whether a class of mappings has a `__delitem__` that can only raise, as Hugging Face's outputs do."""
    deletes = next((space["__delitem__"] for base in mro_of(cls) if "__delitem__" in (space := namespace_of(base))), None)
    if type(deletes) is not types.FunctionType:
        return False
    return not any(step.opname.startswith("RETURN") for step in dis.get_instructions(deletes))


class Kinds:
    """Kinds of types, by the libraries that are loaded in this process when it is made.

    Args:
        table: where the kinds are remembered. One of a `TypeTable` keeps the types alive, for the length of a scan.
    """

    def __init__(self, table: type[TypeTable[str]] = TypeTable) -> None:
        self.bases: dict[int, str] = {id(base): kind for base, kind in _BUILTIN.items()}
        for module, name, kind in (*_BASE_CLASSES, *class_kinds()):
            if (base := loaded_class(module, name)) is not None:
                self.bases[id(base)] = kind
        self.known: TypeTable[str] = table(partial(_kind_of, self.bases))

    @cached_property
    def modules(self) -> dict[str, dict[str, Any]]:
        """Return `module_namespaces()` of the first call: thousands, the same for the whole scan."""
        return module_namespaces()

    def of(self, cls: type) -> str:
        """Return the kind of the instances of `cls`: a node kind, or `leaf`, `class`, `storage`, `array`."""
        return self.known.of(cls)

    def tracked(self, wanted: Container[str], generation: int | None = None) -> list[Any]:
        """Return the objects of these kinds that the garbage collector tracks, by one pass in C over all that it does.

        The list of all is let go piece by piece, while each is in the processor's cache. With `generation`, only objects of
        one of the collector's generations count; 0 is the youngest.
        """
        objects = gc.get_objects(generation)
        if native.compiled is not None:
            taken: list[Any] = native.compiled.take(objects, lambda cls: self.known.of(cls) in wanted)
            return taken
        found: list[list[Any]] = []
        while objects:
            piece = objects[-_PIECE:]
            del objects[-_PIECE:]
            types = list(map(type, piece))
            looked_for = {key for key in self.known.note(types) if self.known[key] in wanted}
            if looked_for:
                found.append(list(compress(piece, map(looked_for.__contains__, map(id, types)))))
        return list(chain.from_iterable(reversed(found)))


def _kind_of(bases: dict[int, str], cls: type) -> str:
    for base in mro_of(cls):
        if id(base) in bases:
            return bases[id(base)]
    if is_graph_node(cls):
        return "graph"
    return "object" if _flags(cls) & _HAVE_GC else LEAF


# --- Attributes and keys, read without running the user's code, and written so that Python would find the same object.


TRANSPARENT = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes of a torch module that nobody writes: `net.head`, not `net._modules['head']`."""

_ATOMS = Types((str, int, bool, float, bytes, type(None)))
_SLOTS = Types((types.GetSetDescriptorType, types.MemberDescriptorType))  # the latter: SimpleNamespace
_BY_NUMBER = ("Sequential", "ModuleList", "ParameterList")
_BY_KEY = ("ModuleDict", "ParameterDict")


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """Return an instance's attribute dict, or None. Reads the slot itself, so no property or `__getattr__` runs."""
    for cls in _mro(type(obj)):
        slot = _namespace(cls).get("__dict__")
        if slot is not None and type(slot) in _SLOTS:
            attributes = slot.__get__(obj)
            return attributes if type(attributes) is dict else None
    return None


def attribute_of(obj: Any, name: str) -> Any:
    """Return the value of a name in an instance's attribute dict, or None; the object stays as quick as it was.

    CPython 3.11 and 3.12 make the dict when it is first asked for: each attribute then takes several times as long to read
    and to set, for as long as the object lives.
    """
    for base in mro_of(type(obj)):
        if name in namespace_of(base):  # it could answer instead
            return (attributes_of(obj) or {}).get(name)
    try:
        return object.__getattribute__(obj, name)
    except AttributeError:
        return None


def plain_attributes(obj: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values that `attribute_of` finds under several names, without the missing ones, in one go."""
    answered = {name for base in mro_of(type(obj)) for name in names if name in namespace_of(base)}
    found: dict[str, Any] = {}
    for name in names:
        if name in answered:
            found[name] = attribute_of(obj, name)
            continue
        try:
            found[name] = object.__getattribute__(obj, name)
        except AttributeError:  # quicker than a context manager
            continue
    return found


def hiding_names(cls: type) -> frozenset[str]:
    """Return the names that the class answers itself (a property), whatever the instance's attribute dict says."""
    names = set()
    for base in mro_of(cls):
        for name, value in list(namespace_of(base).items()):
            if type(name) is str and any("__set__" in namespace_of(value_base) for value_base in mro_of(type(value))):
                names.add(name)
    return frozenset(names)


def key_text(key: object) -> str:
    """Return a dict key as text: atoms as written, anything else by its type (its repr would be the user's code)."""
    if _is_atom(key):
        text = repr(key)
        return text if len(text) <= 40 else text[:37] + "…'"
    if type(key) is tuple and all(map(_is_atom, key)):
        return repr(key)
    return f"<{name_of(type(key))}>"


def _is_atom(key: object) -> bool:
    return type(key) in _ATOMS and (type(key) is not float or math.isfinite(key))  # nan finds nothing, inf is no name


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the entries of a dict of attributes as code that gives them."""

    place: str  # the attribute that gives the dict itself
    hidden: frozenset[str] = frozenset()  # names that the owner answers with something else
    by_number: bool = False  # `[0]`, as of an nn.Sequential
    by_key: bool = False  # `["name"]`, as of an nn.ModuleDict

    @classmethod
    def of_parts(cls, place: str, owner: type) -> Writer:
        """Return the one for the parts (modules, parameters, buffers) of instances of `owner`, a torch module."""
        nn = sys.modules.get("torch.nn")
        spaces = {} if nn is None else nn.__dict__
        bases = mro_of(owner)
        by_number = any(spaces.get(name) in bases for name in _BY_NUMBER)
        return cls(place, by_number=by_number, by_key=any(spaces.get(name) in bases for name in _BY_KEY))

    def label(self, name: str, position: int = -1) -> str:
        """Return the step to the attribute `name`, the dict's entry at `position`."""
        if self.place == "__dict__" and name in TRANSPARENT:
            return ""
        if self.by_number and name == str(position):
            return f"[{name}]"
        if self.by_key:
            return f"[{key_text(name)}]"
        is_plain = name.isidentifier() and not keyword.iskeyword(name) and name not in self.hidden
        return f".{name}" if is_plain else f".{self.place}[{key_text(name)}]"
