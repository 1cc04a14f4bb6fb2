"""The latest calls of models, noted in every batch, and read only where one of them has to be examined again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from nbguard.memory.scan.weak_references import weak_reference


class CallArguments(tuple[Any, ...]):
    """All arguments of a call in a row, as if positional; the last ones were given by `names`."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], named: Mapping[str, Any]) -> CallArguments:
        """Return the values of a call, positional ones first."""
        arguments = cls((*args, *named.values()))
        arguments.names = tuple(named)
        return arguments


_KEPT = 16
_GONE = object()
_AS_THEY_ARE = frozenset((int, float, bool, str, bytes, type(None), weakref.ref))
_Call = tuple[int, int, Any, Any, tuple[str, ...]]
"""Number of the batch, number of losses before, reference to the model, arguments, and the names of the last ones."""


class ArgumentsGoneError(Exception):
    """The arguments of a call are not there any more."""


class ModelCalls:
    """The calls that led to the latest loss, or to the one that comes. Their arguments are held weakly unless they are kept.

    A call is a plain tuple, which `note` adds without a call of Python code: in a fit all that a batch touches is cold.
    """

    __slots__ = ("_calls", "note")

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_KEPT)
        self.note: Callable[[_Call], None] = self._calls.append

    def keep(self, args: Any) -> None:
        """Hold the arguments of the call noted last until `release`; and those of no earlier batch."""
        last = self._calls.pop()
        earlier = [call for call in self._calls if call[:2] == last[:2]]
        self._calls.clear()
        self._calls.extend((*earlier, (*last[:3], tuple(args), last[4])))

    def release(self) -> None:
        """Hold all arguments weakly from now on."""
        calls = [(*call[:3], weak(call[3]), call[4]) for call in self._calls]
        self._calls.clear()
        self._calls.extend(calls)

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def latest(self) -> list[tuple[Any, Any, tuple[str, ...]]]:
        """Return reference to the model, arguments and names of the calls between two losses of a batch, in their order."""
        return [call[2:] for call in self._calls if call[:2] == self._calls[-1][:2]]


def weak_arguments(args: Any) -> Any:
    """Return the arguments of a call, held weakly."""
    try:
        return weak(tuple(args))
    except RecursionError:  # a list that holds itself
        return (_GONE,)


def weak(value: Any) -> Any:
    """Return a value with weak references in the place of all objects that allow them, in containers, too."""
    cls = type(value)
    if cls in (tuple, list):
        return cls([weak(item) for item in value])
    if cls is dict:
        return {key: weak(item) for key, item in value.items()}
    if cls in _AS_THEY_ARE:
        return value
    reference = weak_reference(value)
    return _GONE if reference is None else reference


def strong(value: Any) -> Any:
    """Return the value that `weak` was given.

    Raises:
        ArgumentsGoneError: a part of it is gone.
    """
    cls = type(value)
    if cls in (tuple, list):
        return cls([strong(item) for item in value])
    if cls is dict:
        return {key: strong(item) for key, item in value.items()}
    target = value() if cls is weakref.ref else value
    if value is _GONE or (target is None and value is not None):
        raise ArgumentsGoneError
    return target
