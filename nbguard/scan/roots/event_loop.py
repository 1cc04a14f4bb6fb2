"""Asynchronous generators that have been dropped, and that the event loop closes at its next turn.

When the last reference to a suspended one goes, a hook of asyncio's puts `loop.create_task(generator.aclose())` into the loop's
queue (CPython 3.10 to 3.14: `BaseEventLoop._asyncgen_finalizer_hook`). Until then the queue keeps what the generator's
variables lead to, and nothing can be done about it but to let the loop turn.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from nbguard.scan.heap.kinds import name_of
from nbguard.scan.roots.root import LiveRoot


def closing_handles() -> list[Any]:
    """Return the entries of the queue that close such generators; none where no event loop of asyncio's own runs here."""
    events = sys.modules.get("asyncio.events")
    loop = None if events is None else events._get_running_loop()
    queue = getattr(loop, "_ready", None)
    return [handle for handle in list(queue) if _closes(handle)] if type(queue) is deque else []


def closing_roots(handles: Iterable[Any]) -> list[LiveRoot]:
    """Return the root of what these entries keep, if there are any."""
    objects = tuple(handle._args[0] for handle in handles)
    what = "a dropped asynchronous generator, closed when the cell has ended"
    return [LiveRoot(kind="library", label="asyncio", objects=objects, what=what, is_ending=True)] if objects else []


def _closes(handle: Any) -> bool:
    callback, args = getattr(handle, "_callback", None), getattr(handle, "_args", None)
    is_task = type(callback) is types.MethodType and callback.__func__.__name__ == "create_task"
    return is_task and type(args) is tuple and len(args) == 1 and name_of(type(args[0])) == "async_generator_athrow"
