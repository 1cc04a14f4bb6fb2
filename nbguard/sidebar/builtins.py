"""Messages as plain data, without the copies of `dataclasses.asdict`: a tick goes out four times a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

_ATOMS = frozenset({str, int, float, bool, type(None)})


def to_builtins(value: Any) -> Any:
    """Return a dataclass as a dict, a `NamedTuple` as a tuple, and their fields likewise; all else, immutable, as it is.

    A tuple's items are all of a kind: its first tells whether they are dataclasses or `NamedTuple`s. Those of other tuples
    are neither.
    """
    kind: Any = type(value)
    if kind is tuple:
        first: Any = type(value[0]) if value else str
        return tuple([to_builtins(item) for item in value]) if _names(first) or _is_named_tuple(first) else value
    names = _names(kind)
    if names:
        items = zip(names, _reader(kind)(value), strict=True)
        return {name: item if type(item) in _ATOMS or item == () else to_builtins(item) for name, item in items}
    return tuple(value) if _is_named_tuple(kind) else value


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are: what `json` asks for where it meets an object that it does not know."""
    kind: Any = type(value)
    names = _names(kind)
    if not names:
        raise TypeError(f"{kind.__name__} is no part of a message")
    return dict(zip(names, _reader(kind)(value), strict=True))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


@cache
def _reader(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads all fields of a dataclass at once."""
    names = _names(kind)
    return attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)


@cache
def _is_named_tuple(kind: type) -> bool:
    return kind is not tuple and issubclass(kind, tuple)
