"""A root of the heap walk together with the objects it refers to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbguard.memory.core.facts import CacheKind, Registry, RootKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRoot:
    """A root with the objects it refers to. Lives only while the walk runs; `Root`, with the same fields, remains of it."""

    kind: RootKind  # of the place that keeps the objects
    label: str  # how a report calls it: a name, `Out[3]`, `last error`
    objects: tuple[Any, ...]  # that it refers to, strongly
    cell: int | None = None  # number of the cell that bound it last, where that is known
    what: str = ""  # a few words on it
    ended_by: str = ""  # the line that ends it, where the root knows one
    module: str = ""  # module whose import makes the label an expression
    is_class: bool = False  # it is the attributes of a library's class
    thread: str = ""  # name of the thread that a frame runs in, unless it is the one that scans, or that it is
    registry: Registry = ""  # the part of Python that it stands for, where the line that ends it depends on that
    cache: CacheKind = ""  # the cache that it stands for
    is_shown: bool = True  # False: something holds its objects that Python does not show
    is_ending: bool = False  # it lets go by itself, at the next turn of the event loop
