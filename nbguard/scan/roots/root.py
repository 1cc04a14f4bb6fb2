"""A root of the heap walk together with the objects it refers to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbguard.memory.facts import CacheKind, RootKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRoot:
    """A root with the objects it refers to. Lives only while the walk runs; `Root`, with the same fields, remains of it."""

    kind: RootKind
    label: str
    objects: tuple[Any, ...]
    cell: int | None = None
    what: str = ""
    ended_by: str = ""
    thread: str = ""
    cache: CacheKind = ""
