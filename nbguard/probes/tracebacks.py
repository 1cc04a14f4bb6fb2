"""The last error: everything in Python and IPython that keeps an exception, and with it its frames, alive."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.core.facts import DEBUGGER
from nbguard.probes.roots import LiveRoot

LABEL = "last error"
PDB_VARIABLES = "__pdb_convenience_variables"
"""Since Python 3.12 the debugger leaves the frame and the exception it looked at in the globals of the code it stopped in."""
_SYS_NAMES = ("last_exc", "last_value", "last_traceback", "last_type")


def error_places(shell: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, object) of all that holds the last error: Python's own record, IPython's printer, debugger and result."""
    for name in _SYS_NAMES:
        if sys.__dict__.get(name) is not None:
            yield f"sys.{name}", sys.__dict__[name]
    modules = [module.__dict__ for module in list(sys.modules.values()) if type(module) is types.ModuleType]
    spaces = {id(space): space for space in (*modules, *(() if shell is None else (shell.user_ns,)))}
    for space in spaces.values():
        if type(space.get(PDB_VARIABLES)) is dict:
            yield PDB_VARIABLES, space[PDB_VARIABLES]
    if shell is None:
        return
    for printer in ("InteractiveTB", "SyntaxTB"):
        found = getattr(shell, printer, None)
        for name in ("tb", "evalue", "pdb"):
            value = getattr(found, name, None)
            if value is not None and type(value) is not type:
                yield f"{printer}.{name}", value
    result = shell.last_execution_result
    for name in ("error_in_exec", "error_before_exec"):
        value = None if result is None else result.__dict__.get(name)
        if value is not None:
            yield f"last_execution_result.{name}", value


def error_roots(shell: Any) -> list[LiveRoot]:
    """Return the last error as one root, and debuggers left over from `set_trace()`, or nothing."""
    tracers = tuple(frame.f_trace for frame in traced_frames())
    found = [LiveRoot("error", DEBUGGER, tracers, what="its last stop")] if tracers else []
    objects = tuple(value for _, value in error_places(shell))
    error = next((value for value in objects if isinstance(value, BaseException)), None)
    if not objects:
        return found
    what = type(error).__name__ if error is not None else "traceback"
    return [*found, LiveRoot("error", LABEL, objects, _cell_of(error, shell), what)]


def traced_frames() -> list[types.FrameType]:
    """Return the running frames of this thread on which a debugger that has ended left its trace function.

    `set_trace()` puts it on every frame up to the outermost, `continue` takes it off all but that one.
    """
    found = []
    frame = sys._getframe() if sys.gettrace() is None and "bdb" in sys.modules else None
    while frame is not None:
        trace = frame.f_trace
        if type(trace) is types.MethodType and sys.modules["bdb"].Bdb in type(trace.__self__).__mro__:
            found.append(frame)
        frame = frame.f_back
    return found


def _cell_of(error: BaseException | None, shell: Any) -> int | None:
    """Return the number of the cell in which the error was raised."""
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    traceback = None if error is None else error.__traceback__
    while traceback is not None:
        number = numbers.get(traceback.tb_frame.f_code.co_filename)
        if type(number) is int:
            return number
        traceback = traceback.tb_next
    return None


@dataclass(frozen=True)
class ErrorParts:
    """The frames and exceptions of the last error, by id."""

    frames: dict[int, types.FrameType]
    errors: dict[int, BaseException]


def error_parts(shell: Any) -> ErrorParts:
    """Return what the last error keeps: of chained and grouped exceptions and of the debugger too."""
    found = ErrorParts({}, {})
    seen: set[int] = set()
    todo = [value for _, value in error_places(shell)]
    while todo:
        value = todo.pop()
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is dict:  # what the debugger left
            todo += value.values()
        elif type(value) is types.FrameType:
            found.frames[id(value)] = value
            todo.append(value.f_back)
        elif type(value) is types.TracebackType:
            todo += [value.tb_frame, value.tb_next]
        elif isinstance(value, BaseException):
            found.errors[id(value)] = value
            todo += [value.__traceback__, value.__context__, value.__cause__, *getattr(value, "exceptions", ())]
    return found
