"""Dataclasses whose methods are made when they are first called: nbguard has hundreds, and a notebook makes instances of few.

The standard decorator compiles up to six functions for each class, which is most of the time that importing its module takes.
Here `__init__` is compiled for the first instance, and all other methods go by the names of the fields and are not compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, kw_only=False, eq=True, repr=True):  # noqa: A002 - its name there
        """Make a class a dataclass, as `dataclasses.dataclass` does."""

        def made(cls):
            own = {name for name, value in vars(cls).items() if value is not None}  # None: `__hash__` beside an `__eq__`
            inherits = any(map(dataclasses.is_dataclass, cls.__bases__))  # the standard one compares `frozen` with its bases'
            cls = dataclasses.dataclass(
                cls, init=False, repr=False, eq=False, frozen=frozen and inherits, slots=slots, kw_only=kw_only
            )
            cls.__dataclass_params__.frozen = frozen
            methods = {"__init__": _Init(cls, frozen=frozen)}
            if repr:
                methods["__repr__"] = _repr
            if eq:
                methods |= _comparison(cls, is_hashed=frozen)
            if frozen:
                methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
            if frozen and slots:
                methods |= {"__getstate__": _state, "__setstate__": _set_state}
            for name, method in methods.items():
                if name not in own:
                    setattr(cls, name, method)
            return cls

        return made if cls is None else made(cls)


_set = object.__setattr__


class _Init:
    """Stands for the `__init__` of a class until it is first asked for."""

    def __init__(self, cls: type[Any], *, frozen: bool) -> None:
        self._cls = cls
        self._frozen = frozen

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Callable[..., None]:
        function = _init(self._cls, frozen=self._frozen)
        type.__setattr__(self._cls, "__init__", function)
        bound: Callable[..., None] = function if instance is None else function.__get__(instance)
        return bound


def _init(cls: type[Any], *, frozen: bool) -> Any:
    """Compile the `__init__` of a class: fields without a default, then those with one, then those that are given by name."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    known: dict[str, Any] = {"_set": _set, "_NEW": _NEW}
    order: dict[bool, list[str]] = {False: [], True: []}
    lines = []
    for field in fields:
        name, default, value = field.name, "", field.name
        if field.default is not MISSING:
            default, known[f"_default_{name}"] = f"=_default_{name}", field.default
        elif field.default_factory is not MISSING:
            known[f"_make_{name}"] = field.default_factory
            default, value = "=_NEW", f"_make_{name}() if {name} is _NEW else {name}"
        order[bool(field.kw_only)].append(name + default)
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    arguments = ", ".join(("self", *order[False], *(("*", *order[True]) if order[True] else ())))
    exec("\n ".join((f"def __init__({arguments}):", *lines, "pass")), known)  # noqa: S102 - names of fields of ours
    function = known["__init__"]
    function.__qualname__ = f"{cls.__qualname__}.__init__"
    function.__annotations__ = {**{field.name: field.type for field in fields}, "return": None}
    return function


class _New:
    """The default of a field that has a new value in each instance."""

    def __repr__(self) -> str:
        return "<factory>"


_NEW = _New()


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _comparison(cls: type[Any], *, is_hashed: bool) -> dict[str, Any]:
    """Return the methods that compare instances of a class by their fields."""
    compared = [field.name for field in dataclasses.fields(cls) if field.compare]
    values: Callable[[Any], Any] = attrgetter(*compared) if compared else type

    def equal(self: Any, other: Any) -> Any:
        return NotImplemented if other.__class__ is not self.__class__ else self is other or values(self) == values(other)

    def hashed(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": equal, "__hash__": hashed if is_hashed else None}


def _refuse(self: Any, name: str, *_: Any) -> None:
    raise FrozenInstanceError(f"{name!r} of a {type(self).__name__} cannot be changed")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, field.name, value)
