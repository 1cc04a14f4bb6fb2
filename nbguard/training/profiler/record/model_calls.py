"""The latest calls of models, with the user's lines that led to them, read only where one has to be examined again."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.weak_references import weak_reference
from nbguard.training.profiler.analysis.time.stacks import COMPREHENSIONS

# --- Lines of the user's that led to a call, and calls that look as if they were made in such a line


NAME = "nbguard_call"
"""The name of the calling function, which tells it from the user's."""
_CALL = (lambda function, args, named, __tracebackhide__=True: function(*args, **named)).__code__.replace(co_name=NAME)  # noqa: ARG005


class CallsOnLines:
    """Keeps the code for each line that calls were made in."""

    def __init__(self) -> None:
        self._codes: dict[tuple[CodeType, int], CodeType] = {}

    def at(self, frame: FrameType) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
        """Return a function that calls another one, with these arguments, in the line where a frame is."""
        line = frame.f_code, frame.f_lineno
        code = self._codes.get(line)
        if code is None:
            file, number = line[0].co_filename, line[1]
            code = self._codes[line] = _CALL.replace(co_filename=file, co_firstlineno=number)
        return FunctionType(code, frame.f_globals, NAME, (True,))

    def clear(self) -> None:
        """Forget all lines."""
        self._codes.clear()


class ModuleSet:
    """Modules, held weakly and told apart by identity: the hash of a metric of torchmetrics is made of its state."""

    def __init__(self) -> None:
        self._held: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, module: Any) -> bool:
        held = self._held.get(id(module))
        return held is not None and held() is module

    def __iter__(self) -> Iterator[Any]:
        return iter([module for held in tuple(self._held.values()) if (module := held()) is not None])

    def __len__(self) -> int:
        return len(self._held)

    def add(self, module: Any) -> None:
        """Add a module, until it is no more."""
        key, forget = id(module), self._held.pop
        self._held[key] = weakref.ref(module, lambda _: forget(key, None))

    def clear(self) -> None:
        """Forget all modules."""
        self._held.clear()


class CallLines:
    """Finds the line of the user's that has led to a call."""

    def __init__(self) -> None:
        self._libraries = (*library_paths(), "<frozen")
        self._known: dict[Any, bool] = {}

    def here(self) -> tuple[str, int, str] | None:
        """Return the file, the line and the function of the innermost frame that is no library's, or None."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            is_library = self._known.get(code)
            if is_library is None:
                is_library = self._known[code] = code.co_filename.startswith(self._libraries)
            if not is_library:
                return code.co_filename, frame.f_lineno, _function(code)
            frame = frame.f_back
        return None


def _function(code: CodeType) -> str:
    """Return the name of a function; of a comprehension, that of the function around it."""
    if code.co_name not in COMPREHENSIONS:
        return code.co_name
    around = getattr(code, "co_qualname", code.co_name).split(".")  # Python 3.10 does not know it
    return next((name for name in reversed(around) if name not in (*COMPREHENSIONS, "<locals>")), "<module>")


# --- model calls


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
