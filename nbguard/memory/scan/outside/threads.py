"""Running threads as holders, by the registry of `threading` and by the variables of their functions."""

from __future__ import annotations

import threading
import types
from typing import Any

from nbguard.libraries import emptied_by
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.memory.scan.heap.walk import Walk
from nbguard.memory.scan.outside.region import Rooted
from nbguard.memory.scan.roots.frames import LiveRoot, frame_locals, is_of_interest, running_frames

_registry: Any = threading


def threads_of(walk: Walk, holder: Any, held_by_it: list[int]) -> list[Rooted]:
    """Return a root for each running thread that the registry of `threading` holds; none where `holder` is something else."""
    if holder is not _registry._active:
        return []
    return [(_root_of(walk.objects[n]), [n]) for n in held_by_it]


def held_by_threads(walk: Walk, held: list[int], named: list[Rooted]) -> list[Rooted]:
    """Return a root for each other thread that has some of `held` as its arguments or as variables.

    The functions that only pass on a call, such as those which feed a queue, are no roots of the walk's. The stack of a
    thread has its arguments as well. A thread that is a root among `named` gets no other, but has these, too.
    """
    roots = {n: own for root, own in named if root.thread for n in own}
    numbers, more = {id(walk.objects[n]): n for n in held}, list[Rooted]()
    variables = _variables() if numbers else {}
    for ident, thread in list(_registry._active.items()) if numbers else ():
        if ident != threading.get_ident():
            arguments = attribute_of(thread, "_args")
            own = sorted(numbers.pop(key) for key in {id(arguments), *variables.get(ident, ())} & numbers.keys())
            known = roots.get(walk.number.get(id(thread), -1))
            if known is not None:
                known += own
            elif own:
                more.append((_root_of(thread), own))
    return more


def _variables() -> dict[int, set[int]]:
    """Return the ids of the values of variables in such functions, by the thread that runs them."""
    found: dict[int, set[int]] = {}
    for ident, frame in running_frames():
        if not is_of_interest(frame):
            found.setdefault(ident, set()).update(map(id, frame_locals(frame).values()))
    return found


def _root_of(thread: Any) -> LiveRoot:
    name = str(object.__getattribute__(thread, "_name"))  # its dict, once it is made, would stand between it and its attributes
    line = f"import threading; [(t.cancel(), t.join()) for t in threading.enumerate() if t.name == {name!r}];"
    is_timer = type(thread) is threading.Timer
    what = "waits until its time comes" if is_timer else "runs"
    ended_by = line if is_timer else _own_end(attribute_of(thread, "_target"))
    return LiveRoot(kind="library", label=f"thread {name}", objects=(), what=what, thread=name, ended_by=ended_by)


def _own_end(function: Any) -> str:
    """Return the line that its library has against a thread which runs this function for ever; empty without one."""
    is_plain = type(function) is types.FunctionType
    return emptied_by().get((str(function.__module__), str(function.__name__)), "") if is_plain else ""
