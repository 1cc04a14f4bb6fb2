"""What the event loop holds until its next turn: dropped asynchronous generators, and the result that woke the cell.

When the last reference to a suspended one goes, a hook of asyncio's puts `loop.create_task(generator.aclose())` into the loop's
queue (CPython 3.10 to 3.14: `BaseEventLoop._asyncgen_finalizer_hook`). Until then the queue keeps what the generator's
variables lead to, and nothing can be done about it but to let the loop turn. The entry that runs keeps its arguments until it
returns: the task that a cell has awaited, with its error, until the cell has ended.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from nbguard.scan.heap.kinds import name_of
from nbguard.scan.roots.frames import frame_locals
from nbguard.scan.roots.root import LiveRoot


def ending_handles() -> list[Any]:
    """Return the entries that run or close such generators; none where no event loop of asyncio's own runs in this thread."""
    events = sys.modules.get("asyncio.events")
    loop = None if events is None else events._get_running_loop()
    queue = getattr(loop, "_ready", None)
    if type(queue) is not deque:
        return []
    return [handle for handle in list(queue) if _closes(handle)] + _running()


def ending_roots(handles: Iterable[Any]) -> list[LiveRoot]:
    """Return the root of what these entries keep, if there are any."""
    objects = tuple(arg for handle in handles for arg in handle._args)
    what = "let go when the cell has ended"
    return [LiveRoot(kind="library", label="asyncio", objects=objects, what=what, is_ending=True)] if objects else []


def _running() -> list[Any]:
    """Return the entry that the loop of this thread runs now."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("_run_once", "asyncio.base_events"):
        frame = frame.f_back
    handle = None if frame is None else frame_locals(frame).get("handle")
    return [] if type(getattr(handle, "_args", None)) is not tuple else [handle]


def _closes(handle: Any) -> bool:
    callback, args = getattr(handle, "_callback", None), getattr(handle, "_args", None)
    is_task = type(callback) is types.MethodType and callback.__func__.__name__ == "create_task"
    return is_task and type(args) is tuple and len(args) == 1 and name_of(type(args[0])) == "async_generator_athrow"
