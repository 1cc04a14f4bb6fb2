"""Attributes and keys, read without running the user's code, and written so that Python would find the same object."""

from __future__ import annotations

import keyword
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

from nbguard.memory.scan.heap.kinds import Types, mro_of, name_of, namespace_of

TRANSPARENT = frozenset({"_modules", "_parameters", "_buffers"})
"""Attributes of a torch module that nobody writes: `net.head`, not `net._modules['head']`."""

_ATOMS = Types((str, int, bool, float, bytes, type(None)))
_SLOTS = Types((types.GetSetDescriptorType, types.MemberDescriptorType))  # the latter: SimpleNamespace
_BY_NUMBER = ("Sequential", "ModuleList", "ParameterList")
_BY_KEY = ("ModuleDict", "ParameterDict")


def attributes_of(obj: Any) -> dict[str, Any] | None:
    """Return an instance's attribute dict, or None. Reads the slot itself, so no property or `__getattr__` runs."""
    for cls in mro_of(type(obj)):
        slot = namespace_of(cls).get("__dict__")
        if type(slot) in _SLOTS:
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
