"""Finding an out-of-memory error in an exception, its cause, its context and the parts of a group.

Read by the slots of Python's own classes: an exception may be of the user's making.
"""

from __future__ import annotations

import builtins
import math
import sys
from dataclasses import replace
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of, name_of, namespace_of
from nbguard.memory.scan.oom.message import OomText, read_text

_FAR_ENOUGH = 100
"""Most exceptions of a chain that are examined."""
_LONG_ENOUGH = 20_000
"""Characters of a message that are read: a worker's quotes a whole traceback."""
_SLOTS = namespace_of(BaseException)
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)


def slot(error: BaseException, name: str) -> Any:
    """Return an attribute that every exception has (`args`, `__cause__`), past anything that a subclass put over it."""
    return _SLOTS[name].__get__(error)


def is_exception(value: object) -> bool:
    """Say whether a value is an exception, by its type alone: `isinstance` would ask a proxy's `__class__`."""
    return BaseException in mro_of(type(value))


def parts_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions in a group; none if it is no group."""
    parts: tuple[BaseException, ...] = ()
    if _GROUP is not None and _GROUP in mro_of(type(error)):
        parts = namespace_of(_GROUP)["exceptions"].__get__(error)
    return parts


def find_in_chain(error: BaseException) -> tuple[BaseException, OomText] | None:
    """Return the first out-of-memory error that `error` is or leads to, with its facts."""
    todo, seen = [error], set[int]()
    while todo and len(seen) < _FAR_ENOUGH:
        current = todo.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        text = read(current)
        if text is not None:
            return current, text
        todo += [next_one for next_one in (slot(current, "__cause__"), slot(current, "__context__")) if next_one is not None]
        todo += parts_of(current)
    return None


def read(error: BaseException) -> OomText | None:
    """Return the facts on memory in one exception, or None."""
    bases, args = mro_of(type(error)), slot(error, "args")
    words = [str.__str__(arg) for arg in args if str in mro_of(type(arg))]
    errno = namespace_of(OSError)["errno"].__get__(error) if OSError in bases else None
    text = read_text({name_of(base) for base in bases}, " ".join(words)[:_LONG_ENOUGH], errno)
    if text is not None and text.requested is None and MemoryError in bases:
        return replace(text, requested=_array_bytes(args))
    return text


def _array_bytes(args: tuple[Any, ...]) -> int | None:
    """Return the size of the array that NumPy could not make: its error has no text, but the shape and the dtype."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or len(args) != 2 or type(args[0]) is not tuple or numpy.dtype not in mro_of(type(args[1])):
        return None
    return math.prod(args[0]) * int(args[1].itemsize) if all(type(length) is int for length in args[0]) else None
