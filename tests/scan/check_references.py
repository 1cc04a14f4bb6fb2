"""Whether walks by the compiled part keep references or memory: `python -m tests.scan.check_references [100000]`."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from nbguard.memory.scan.heap.kinds import Kinds, never_asked
from nbguard.memory.scan.heap.referents import Referents, walker
from tests.scan.containers import HOLDING

_LARGE_ENOUGH = 64


def kept_by_walks(count: int) -> list[str]:
    """Walk one heap `count` times; return the objects of it whose count of references has changed, and other memory kept."""
    values: list[Any] = [make([torch.ones(3)]) for name, make in HOLDING.items() if name not in _CHANGING]
    values += [[{"id": n, "parts": (n, [n])} for n in range(_LARGE_ENOUGH)], [[torch.ones(1)] for _ in range(_LARGE_ENOUGH)]]
    kinds = Kinds()
    stop = {id(never_asked()), *map(id, kinds.modules.values())}
    referents = Referents(kinds, True, stop)

    def walk() -> list[Any]:
        """Walk as `Walk.run` does, but past the objects that Python looks into."""
        one = walker(referents)
        objects, number, lists = list(values), {id(value): n for n, value in enumerate(values)}, list[list[int]]()
        names = [kinds.of(type(value)) for value in values]
        while len(lists) < len(objects):
            before = len(lists)
            one.follow((objects, names, number, lists), stop, {}, len(objects), 10_000)
            lists += [[]] * (len(lists) == before)
        return objects

    for _ in range(3):
        walk()
    watched = [*walk(), *map(type, values), *kinds.known._types]
    gc.collect()
    counts, blocks = [*map(sys.getrefcount, watched)], sys.getallocatedblocks()
    for _ in range(count):
        walk()
    gc.collect()
    after = [*map(sys.getrefcount, watched)]
    changed = [
        f"{type(obj).__name__}: {new - old:+}"
        for obj, old, new in zip(watched, counts, after, strict=True)
        if new != old and obj is not None
    ]
    more = sys.getallocatedblocks() - blocks - len(after)
    return changed + ([f"{more} blocks of memory"] if more > 50 + count // 100 else [])


_CHANGING = {"exception", "exception cause", "weakref with callback"}
"""Holders whose heap reaches into what runs."""


if __name__ == "__main__":
    walks = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    found = kept_by_walks(walks)
    print(f"{walks:,} walks: {found or 'nothing is kept'}")
    sys.exit(bool(found))
