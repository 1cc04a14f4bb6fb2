"""Roots of the heap walk, and the variables of frames, finished ones (a traceback's) and running ones."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.libraries import experiments
from nbguard.memory.core.facts import CacheKind, Registry, RootKind

# --- A root of the heap walk together with the objects it refers to.


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


OPTIMIZED = 0x1  # CO_OPTIMIZED: only functions have fast locals, others a namespace that is the real thing
DISPATCH = frozenset(
    [
        "nbguard",
        "IPython",
        "ipykernel",
        "tornado",
        "asyncio",
        "zmq",
        "traitlets",
        "jupyter_client",
        "marimo",
        "multiprocessing",
        "uvicorn",
        "threading",
        "concurrent",
        "selectors",
        "debugpy",
        "_pydevd_bundle",
        "_pytest",
        "pluggy",
        "execnet",
        "__channelexec__",  # xdist's worker
        "runpy",
    ]
)
"""Packages whose running frames only pass a call on. Their variables hold the notebook itself, nothing of an experiment."""

_EXECUTOR = "joblib.externals.loky"
"""joblib's executor of processes: its threads' objects are the executor's, and go with it."""


def frame_locals(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's variables by name, and leave the frame as it was.

    Up to Python 3.12 reading `f_locals` fills a dict that the frame keeps, and with it everything in it: it is emptied
    again where it was empty before, as an earlier scan left it, or where nobody else holds it (a debugger, a call of
    `locals()`). Frames of modules and classes show their real namespace, which is only read.
    """
    return _read(frame)[1]


def _read(frame: types.FrameType) -> tuple[int, dict[str, Any]]:
    """Return the id of the mapping of a frame's variables, and a copy of it."""
    sizes = {id(obj): len(obj) for obj in gc.get_referents(frame) if type(obj) is dict}
    mapping = frame.f_locals
    variables = dict(mapping)
    if type(mapping) is dict and frame.f_code.co_flags & OPTIMIZED:
        is_ours = sizes.get(id(mapping)) == 0  # a walk that meets it holds it, too
        if is_ours or sys.getrefcount(mapping) <= 3:  # frame, here, the call
            mapping.clear()
    return id(mapping), variables


def frame_of(code: types.CodeType | None, frame: types.FrameType | None) -> types.FrameType | None:
    """Return the first that runs this code, of `frame` and those that led to it."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def attached_locals(frame: types.FrameType) -> int | None:
    """Return the id of the dict of variables that a finished frame keeps, if any.

    A class body or executed code keeps its namespace (a module's is never walked, so it does not matter); a function's
    frame, up to Python 3.12, the copy that a debugger read.
    """
    held = {id(obj) for obj in gc.get_referents(frame) if type(obj) is dict}
    if not held:
        return None
    mapping, _ = _read(frame)
    return mapping if mapping in held else None


def running_frames() -> Iterator[tuple[int, types.FrameType]]:
    """Yield (thread, frame) of everything that runs now, each thread from its innermost frame outwards.

    All are taken at once: while the caller looks at one, other threads go on, and the way out of a generator's frame ends there
    once the generator rests. Nothing here may still have a frame at the end: from Python 3.13 on this function's own would keep
    itself, and with it all that the functions which called it know, until the next collection.
    """
    tops = sys._current_frames()
    frames = []
    for ident in list(tops):
        frame: types.FrameType | None = tops.pop(ident)
        while frame is not None:
            frames.append((ident, frame))
            frame = frame.f_back
    frames.reverse()
    while frames:
        yield frames.pop()


def running_roots(but: int | None = None) -> list[LiveRoot]:
    """Return a root for each running function of every thread (`but` one): objects of its variables are in use."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    roots = []
    for ident, frame in running_frames():
        if ident != but and is_of_interest(frame):
            thread = "" if ident == threading.get_ident() else str(names.get(ident, ident))
            label = f"running {frame.f_code.co_name}()" + (f" in thread {thread}" if thread else "")
            values = tuple(frame_locals(frame).values())
            roots.append(LiveRoot(kind="frame", label=label, objects=values, what="in use", thread=thread))
    return roots


def is_of_interest(frame: types.FrameType) -> bool:
    """Say whether a frame is a function's whose variables tell something of an experiment."""
    module = str(frame.f_globals.get("__name__", ""))
    is_dispatch = module.partition(".")[0] in DISPATCH or module.startswith(_EXECUTOR)
    return bool(frame.f_code.co_flags & OPTIMIZED) and not is_dispatch


def running_fit_owners() -> set[int]:
    """Return the ids of the Learners and Trainers whose fit runs now, in any thread."""
    loops = {loop for experiment in experiments() for loop in experiment.loops}
    return {
        id(frame_locals(frame).get("self"))
        for _, frame in running_frames()
        if frame.f_globals.get("__name__") in loops and frame.f_code.co_flags & OPTIMIZED
    }
