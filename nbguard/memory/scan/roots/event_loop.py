"""Objects that the event loop holds: tasks and timers that wait in it, and entries that go at its next turn.

At its next turn go dropped asynchronous generators, and the result that woke the cell.
When the last reference to a suspended one goes, a hook of asyncio's puts `loop.create_task(generator.aclose())` into the loop's
queue (CPython 3.10 to 3.14: `BaseEventLoop._asyncgen_finalizer_hook`). Until then the queue keeps what the generator's
variables lead to, and nothing can be done about it but to let the loop turn. The entry that runs keeps its arguments until it
returns: the task that a cell has awaited, with its error, until the cell ends.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from nbguard.memory.scan.heap.kinds import name_of, namespace_of
from nbguard.memory.scan.roots.frames import DISPATCH, frame_locals
from nbguard.memory.scan.roots.registries import callback_name, called, function_of
from nbguard.memory.scan.roots.root import LiveRoot

_OWN = DISPATCH | {"_asyncio", "anyio"}
"""Packages whose tasks and timers run the kernel and the event loop itself."""


def waiting_roots(shell: Any) -> Iterator[LiveRoot]:
    """Yield the tasks and timers of the user's that wait in the event loop of the notebook: it keeps them, whoever has them."""
    asyncio, loop = sys.modules.get("asyncio"), loop_of(shell)
    if asyncio is None or loop is None:
        return
    kernels = asyncio.current_task(loop)  # the one that runs the cell
    for task in sorted((task for task in asyncio.all_tasks(loop) if task is not kernels), key=asyncio.Task.get_name):
        coroutine = asyncio.Task.get_coro(task)
        frame = getattr(coroutine, "cr_frame", None)
        if type(coroutine) is types.CoroutineType and frame is not None and not _is_own(frame.f_globals.get("__name__")):
            name = asyncio.Task.get_name(task)
            line = f"import asyncio; [t.cancel() for t in asyncio.all_tasks() if t.get_name() == {name!r}];"
            yield LiveRoot(
                kind="library",
                label=f"task {name}",
                objects=(task,),
                what=f"{coroutine.__name__}() waits in the event loop",
                ended_by=line,
                registry="task",
            )
    scheduled = getattr(loop, "_scheduled", None)
    for handle in list(scheduled) if type(scheduled) is list else ():
        callback = getattr(handle, "_callback", None)
        if callback is None or _is_own(_module_of(callback)):
            continue
        is_it = f"h.when() == {handle._when!r}"
        yield LiveRoot(
            kind="library",
            label=f"timer {callback_name(called(callback))}",
            objects=(handle,),
            what="waits in the event loop until its time comes",
            ended_by=f"import asyncio; [h.cancel() for h in asyncio.get_running_loop()._scheduled if {is_it}];",
            registry="timer",
        )


def loop_of(shell: Any) -> Any:
    """Return the event loop of this thread, or, asked from another one, the kernel's; None where there is none."""
    events = sys.modules.get("asyncio.events")
    loop = None if events is None else events._get_running_loop()
    return loop or getattr(getattr(getattr(shell, "kernel", None), "io_loop", None), "asyncio_loop", None)


def _is_own(module: object) -> bool:
    return type(module) is str and module.partition(".")[0] in _OWN


def _module_of(callback: Any) -> object:
    function = function_of(called(callback))
    if type(function) in (types.FunctionType, types.BuiltinFunctionType):
        return function.__module__ or namespace_of(type(function.__self__)).get("__module__")
    return namespace_of(type(function)).get("__module__") or type(function).__module__


def ending_handles() -> list[Any]:
    """Return the entries that run or close such generators; none where no event loop of asyncio's own runs in this thread."""
    events = sys.modules.get("asyncio.events")
    loop = None if events is None else events._get_running_loop()
    queue = getattr(loop, "_ready", None)
    if type(queue) is not deque:
        return []
    return [handle for handle in list(queue) if _closes(handle)] + _running()


def ending_roots(handles: Iterable[Any]) -> list[LiveRoot]:
    """Return the root of the objects in these entries, if there are any."""
    objects = tuple(arg for handle in handles for arg in handle._args)
    what = "released when the cell ends"
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
