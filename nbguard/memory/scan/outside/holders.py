"""The objects that refer to others, by passes over the whole heap: each shows as many steps upwards as it can."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from nbguard.memory.scan.heap import native
from nbguard.memory.scan.heap.kinds import FRAMES, never_asked
from nbguard.memory.scan.heap.walk import Walk

_MOST_PASSES = 24
_FEWEST_PASSES = 4
"""Passes that are made however large the heap is."""
_MOST_OBJECTS = 12_000_000
"""Objects that the passes together may go over: a data set in lists has millions."""
_MOST_FOLLOWED = 500
"""Holders whose own holders are looked for before anybody asks for them."""
_CHUNK = 512
_FEW = 8  # objects up to which gc.get_referrers is faster than our own pass, though it compares all with all


class Holders:
    """The holders of a walk's objects. Those found before anybody asked for them are kept until the walk has them, too.

    The holders of an object at one of the ids `ends` are looked for only where they are asked for.
    """

    def __init__(self, walk: Walk, ends: Iterable[int]) -> None:
        self._walk = walk
        self._ends = set(ends)
        self._found: dict[int, Any] = {}
        self._in_walk: dict[int, None] = {}
        self._known = set[int]()  # ids of objects all of whose holders have been found
        self._passes = 0

    def find(self, ids: Iterable[int]) -> bool:
        """Find the holders of the walk's objects with these ids; False if the heap is too large for as many passes."""
        asked = [self._walk.objects[self._walk.number[key]] for key in ids if key not in self._known]
        if not asked:
            return True
        objects = gc.get_objects()
        left = max(_FEWEST_PASSES, min(_MOST_PASSES, _MOST_OBJECTS // len(objects))) - self._passes
        if left <= 0:
            return False
        own = {id(obj) for obj in (asked, objects, self._found, self._walk.objects)}
        found, followed, unused = _upwards(objects, asked, self._ends | self._walk.number.keys() | own, left)
        self._passes += left - unused
        self._known.update(map(id, asked), map(id, followed))
        self._found |= {id(obj): obj for obj in found if id(obj) not in own}
        self.let_go()
        return True

    def __iter__(self) -> Iterator[Any]:
        """Yield all that was found, including the objects that the walk has."""
        yield from (self._walk.objects[self._walk.number[key]] for key in self._in_walk)
        yield from list(self._found.values())

    def callers(self, new: int) -> list[Any]:
        """Return the frames and tracebacks found that hold one of the walk's from number `new` on, all the way up.

        Chains of dozens are usual: a finished frame is held by the frames it called (`f_back`), as long as any traceback
        keeps one of them.
        """
        met = [obj for obj in self._walk.objects[new:] if type(obj) in FRAMES]
        return _frames_above(met, [obj for obj in self._found.values() if type(obj) in FRAMES])

    def let_go(self) -> None:
        """Refer to nothing that the walk has: its references are counted."""
        for key in [key for key in self._found if key in self._walk.number]:
            del self._found[key]
            self._in_walk[key] = None

    def clear(self) -> None:
        """Forget all holders."""
        self._found.clear()
        self._in_walk.clear()


def referrers_of(asked: list[Any]) -> list[Any]:
    """Return the tracked objects that refer to any of `asked`, by one pass."""
    found, _, _ = _upwards(gc.get_objects(), asked, set(), 1)
    return [obj for obj in found if obj is not asked]


def _upwards(objects: list[Any], asked: list[Any], ends: set[int], passes: int) -> tuple[list[Any], list[Any], int]:
    """Return the holders of `asked` and theirs in turn, the ones that were followed, and the number of passes left.

    A class is not followed, nor an object with one of the ids `ends`.
    """
    if native.compiled is None:
        return _upwards_by_python(objects, asked, ends, passes)
    found, followed, left = native.compiled.referrers(objects, asked, ends, passes, _MOST_FOLLOWED)
    return [obj for obj in found if obj is not never_asked()], followed, left


def _upwards_by_python(objects: list[Any], asked: list[Any], ends: set[int], passes: int) -> tuple[list[Any], list[Any], int]:
    """Do as the compiled part does, a step with each pass; frames go all the way up at once."""
    found: dict[int, Any] = {}
    followed: list[Any] = []
    own = {id(obj) for obj in (asked, objects, found, followed, sys._getframe(), never_asked())}
    new, ends = asked, ends.union(map(id, asked))
    while new and passes > 0:
        passes -= 1
        own.add(id(new))
        holders = [obj for obj in _referrers(objects, new) if id(obj) not in own and id(obj) not in found]
        own.add(id(holders))  # the next step meets it
        if any(type(obj) in FRAMES for obj in holders):
            kinds = set(map(id, FRAMES))  # a question to `FRAMES` for each object of the heap takes five times as long
            holders += _frames_above(holders, [obj for obj in objects if id(type(obj)) in kinds])
        found |= {id(obj): obj for obj in holders}
        may_go_on = (obj for obj in holders if id(obj) not in ends and not issubclass(type(obj), type))
        new = list(islice(may_go_on, _MOST_FOLLOWED - len(followed))) if passes else []
        followed += new
    return [obj for obj in objects if id(obj) in found], followed, passes


def _referrers(objects: list[Any], asked: list[Any]) -> list[Any]:
    if len(asked) <= _FEW:
        few = tuple(asked)  # a list would be copied: since 3.13 the copy is found
        return [obj for obj in gc.get_referrers(*few) if obj is not few]
    ids, found = set(map(id, asked)), list[Any]()
    for at in range(0, len(objects), _CHUNK):
        chunk = [obj for obj in objects[at : at + _CHUNK] if obj is not never_asked()]
        if not ids.isdisjoint(map(id, gc.get_referents(*chunk))):
            found += [obj for obj in chunk if not ids.isdisjoint(map(id, gc.get_referents(obj)))]
    return found


def _frames_above(met: list[Any], frames: list[Any]) -> list[Any]:
    """Return the frames and tracebacks among `frames` that hold any of `met`, in however many steps."""
    above: dict[int, list[Any]] = {}
    for obj in frames:
        for ref in gc.get_referents(obj):
            if type(ref) in FRAMES:
                above.setdefault(id(ref), []).append(obj)
    known = set(map(id, met))
    found: list[Any] = []
    todo = [id(obj) for obj in met if type(obj) in FRAMES]
    while todo:
        for obj in above.get(todo.pop(), ()):
            if id(obj) not in known:
                known.add(id(obj))
                found.append(obj)
                todo.append(id(obj))
    return found
