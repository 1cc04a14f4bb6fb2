"""Messages as plain data, without the copies of `dataclasses.asdict`: a tick goes out four times a second."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

_ATOMS = frozenset({str, int, float, bool, type(None)})


def to_builtins(found: Any) -> Any:
    """Return a dataclass as a dict, and what it holds likewise; all else, which must be immutable, as it is.

    A tuple's items are all of a kind: its first tells whether they are dataclasses. Those of other tuples are none.
    """
    kind: Any = type(found)
    if kind is tuple:
        first: Any = type(found[0]) if found else None
        return tuple([to_builtins(each) for each in found]) if _names(first) else found
    names = _names(kind)
    if not names:
        return found
    return {name: value if type(value := getattr(found, name)) in _ATOMS else to_builtins(value) for name in names}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
