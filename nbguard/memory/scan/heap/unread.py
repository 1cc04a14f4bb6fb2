"""Objects of a scan that refuse to be read; each costs its own row, never the scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from nbguard.memory.core.facts import UnreadFact
from nbguard.memory.scan.heap.kinds import name_of

_Read = TypeVar("_Read")


class Unread:
    """Counts the objects that could not be read, each once."""

    def __init__(self) -> None:
        self._types: dict[int, str] = {}  # names of the objects' types, by the objects' ids

    def note(self, obj: object) -> None:
        """Count an object."""
        self._types[id(obj)] = name_of(type(obj))

    def read(self, obj: Any, read: Callable[[Any], _Read], otherwise: _Read) -> _Read:
        """Return the result of `read` on an object; where it fails, count the object and return `otherwise`."""
        try:
            return read(obj)
        except Exception:  # noqa: BLE001 - whatever is odd about one object must not cost the look
            self.note(obj)
            return otherwise

    @property
    def facts(self) -> tuple[UnreadFact, ...]:
        """Return the number of objects of each type, the most first."""
        return tuple(UnreadFact(name, count) for name, count in Counter(self._types.values()).most_common())
