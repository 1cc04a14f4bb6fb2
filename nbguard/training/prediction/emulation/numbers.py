"""A number read from a tensor without data. It may be kept, added up and shown, but decisions by it are noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BINARY = ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv")
_ARITHMETIC = (*(f"__{side}{name}__" for name in _BINARY for side in ("", "r")), "__neg__", "__abs__")
_DECISIONS = ("__bool__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


class UnknownFloat(float):
    """A float whose value is not known. `note` is called when something is decided by it."""

    __slots__ = ("note",)
    note: Callable[[], None]

    @classmethod
    def of(cls, value: float, note: Callable[[], None]) -> UnknownFloat:
        """Return `value` as such a number."""
        own = cls(value)
        own.note = note
        return own

    __hash__ = float.__hash__


def _arithmetic(name: str) -> Callable[..., Any]:
    former = getattr(float, name)

    def method(self: UnknownFloat, *others: Any) -> Any:
        out = former(self, *others)
        return UnknownFloat.of(out, self.note) if type(out) is float else out

    return method


def _decision(name: str) -> Callable[..., Any]:
    former = getattr(float, name)

    def method(self: UnknownFloat, *others: Any) -> Any:
        self.note()
        return former(self, *others)

    return method


for _name in _ARITHMETIC:
    setattr(UnknownFloat, _name, _arithmetic(_name))
for _name in _DECISIONS:
    setattr(UnknownFloat, _name, _decision(_name))
