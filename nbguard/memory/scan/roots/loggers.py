"""Things that loggers keep, which the register of Python's `logging` has for ever: their attributes, and their handlers'."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from nbguard.memory.scan.heap.kinds import Types, attributes_of, name_of
from nbguard.memory.scan.roots.frames import LiveRoot

_OF_LOGGERS = frozenset({"name", "level", "parent", "propagate", "handlers", "disabled", "filters", "manager", "_cache"})
"""Attributes of `logging`'s own."""
_OF_LOGGING: Any = {"kind": "library", "module": "logging", "registry": "logger"}
_PARTS = ("handlers", "filters")
_PLAIN = Types((str, bytes, int, float, bool, type(None)))
_CONTAINERS = Types((list, dict, set, deque))


def logger_roots() -> Iterator[LiveRoot]:
    """Yield the loggers with attributes of other code, and the collections of the handlers and filters of all the others.

    A handler that keeps records back may keep the frames of an error with each.
    """
    for name, logger in {"": logging.root, **logging.root.manager.loggerDict}.items():
        if type(logger) is logging.PlaceHolder:
            continue
        label, attributes = f"logging.getLogger({name!r})", attributes_of(logger) or {}
        if any(key not in _OF_LOGGERS and type(value) not in _PLAIN for key, value in attributes.items()):
            yield LiveRoot(label=label, objects=(logger,), what="attributes of a logger", **_OF_LOGGING)
            continue
        for parts in _PARTS:
            listed = attributes.get(parts)
            for place, part in enumerate(listed if type(listed) is list else ()):
                for key, value in (attributes_of(part) or {}).items():
                    if type(value) in _CONTAINERS and value:
                        path = f"{label}.{parts}[{place}].{key}"
                        what = f"records that a {name_of(type(part))} keeps back"
                        yield LiveRoot(label=path, objects=(value,), what=what, **_OF_LOGGING)
