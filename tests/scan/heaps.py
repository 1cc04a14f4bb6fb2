"""Heaps to walk in both ways, by the compiled part and by Python, and what the two find."""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nbguard.memory.core.facts import Graph
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.heap.compact import compact
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.walk import Walk, never_walked
from nbguard.memory.scan.roots.frames import LiveRoot
from tests.scan.containers import CARRYING, HOLDING, WEAK

_CHANGED_BY_LOOKS = ("exception", "exception cause", "proxy")  # frames get a dict of their variables when these are written
_KEEPING = {name: make for name, make in {**HOLDING, **WEAK}.items() if name not in _CHANGED_BY_LOOKS}


@contextmanager
def walked_by(compiled: Any) -> Iterator[None]:
    """Have heaps walked by this module, or by Python where it is None."""
    former, native.compiled = native.compiled, compiled
    try:
        yield
    finally:
        native.compiled = former


def walk_of(values: list[Any], kinds: Kinds | None = None, most_tensors: int = 25_000) -> Walk:
    """Walk from some values."""
    kinds = kinds or Kinds()
    walk = Walk("cpu", never_walked(kinds), kinds)
    walk.most_tensors = most_tensors
    for value in values:
        walk.add(value)
    walk.run()
    return walk


def graph_of(values: list[Any], most_tensors: int = 25_000) -> tuple[Graph, int, int]:
    """Return the graph of a heap, how many tensors the walk went into, and how many it left out."""
    walk = walk_of(values, most_tensors=most_tensors)
    roots = [
        (LiveRoot(kind="name", label=f"name{n}", objects=()), [number])
        for n, value in enumerate(values)
        if (number := walk.number.get(id(value))) is not None
    ]
    graph = compact(walk, roots, lambda storage: storage.nbytes)
    nodes = tuple(replace(node, ref=0) for node in graph.nodes)  # some objects are made by the walk itself
    graph = replace(graph, nodes=nodes)
    return graph, walk.tensors, len(walk.skipped)


def random_heap(seed: int) -> list[Any]:
    """Return the names of a heap of any objects: some lead to tensors, some in cycles, some are plain data, and large."""
    rng = random.Random(seed)
    made: list[Any] = [torch.ones(rng.randrange(1, 50)) for _ in range(rng.randrange(1, 5))]
    carriers, holders = sorted(CARRYING), sorted(_KEEPING)
    for _ in range(rng.randrange(3, 25)):
        some = rng.sample(made, min(len(made), rng.randrange(1, 4)))
        choice = rng.random()
        if choice < 0.45:
            made.append(_KEEPING[rng.choice(holders)](some))
        elif choice < 0.6:
            made.append(CARRYING[rng.choice(carriers)](torch.ones(rng.randrange(10, 40))))
        elif choice < 0.75:
            made.append(_large(rng, some))
        elif choice < 0.85:
            made.append(_class(rng, some)())
        else:
            _close_a_cycle(rng, made)
    return rng.sample(made, min(len(made), rng.randrange(1, 6)))


def _large(rng: random.Random, some: list[Any]) -> Any:
    """Return a large container of plain data, in which something else may be hidden, deep or not."""
    point = _class(rng, some if rng.random() < 0.2 else [])
    makers = [
        lambda n: n,
        str,
        lambda n: {"id": n, "parts": [n, (n, [n])]},
        lambda n: (n, None),
        lambda n: {n},
        lambda n: point(),
    ]
    make = rng.choice(makers)
    rows: list[Any] = [make(n) for n in range(rng.choice((60, 64, 300)))]
    if rng.random() < 0.5:
        hidden: Any = some
        for _ in range(rng.randrange(4)):
            hidden = rng.choice(([1, hidden], {"x": hidden}, (hidden, 2), point()))
            if type(hidden) is point and hasattr(hidden, "__dict__"):
                hidden.some = some
        rows[rng.randrange(len(rows))] = hidden
    return rng.choice((rows, tuple(rows), dict(enumerate(rows)), {"rows": rows, "n": len(rows)}))


def _class(rng: random.Random, some: list[Any]) -> type:
    space: dict[str, Any] = {"__module__": "__main__", "scale": 2, "twice": property(lambda self: 2)}
    if some:
        space["some"] = some
    if rng.random() < 0.3:
        space |= {"__slots__": ("a", "b")}
        space.pop("some", None)
    return type("Point", (), space)


def _close_a_cycle(rng: random.Random, made: list[Any]) -> None:
    lists = [each for each in made if type(each) is list]
    if lists:
        rng.choice(lists).append(rng.choice(made))


def uninitialised() -> list[Any]:
    """Return instances of the types that C defines, as `__new__` leaves them: many with empty fields."""
    found = []
    for cls in type.__subclasses__(object):
        if cls.__module__ not in _OF_PYTHON:
            continue
        try:
            obj = cls.__new__(cls)
        except Exception:
            continue
        if type(obj) is cls and not isinstance(obj, BaseException):
            found.append(obj)
    return found


_OF_PYTHON = {
    "builtins",
    "collections",
    "functools",
    "itertools",
    "types",
    "_io",
    "_weakref",
    "operator",
    "_thread",
    "_queue",
    "re",
}


class Hostile:
    """An object that must not be asked anything."""

    def _asked(self, *_: object) -> Any:
        raise AssertionError("asked")

    __repr__ = __str__ = __hash__ = __len__ = __iter__ = __bool__ = __getattr__ = _asked  # type: ignore[assignment]
    __class__ = property(_asked)  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


class _Meta(type):
    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(cls) -> int:
        raise AssertionError("hashed")

    def __instancecheck__(cls, instance: object) -> bool:
        raise AssertionError("checked")


def hostile_heap(seed: int, blanks: list[Any]) -> list[Any]:
    """Return a heap of objects that are half made, refuse to be asked, or come in very long chains."""
    rng = random.Random(seed)
    odd: list[Any] = rng.sample(blanks, min(len(blanks), 10))
    odd += [Hostile(), _Meta("Odd", (), {})(), types.CellType(), type, int, list, type(None), NotImplemented]
    finished = (n for n in ())
    list(finished)
    odd += [finished, weakref.ref(Hostile()), object.__new__(Hostile), types.SimpleNamespace()]
    chain: Any = torch.ones(7)
    for _ in range(rng.choice((10, 2_000))):
        chain = rng.choice(([chain], (chain,), {"next": chain}))
    me: list[Any] = []
    me.append(me)
    rng.shuffle(odd)
    return [odd * rng.choice((1, 10)), chain, me, *odd[:5]]
