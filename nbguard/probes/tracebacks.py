"""The last error: everything in Python and IPython that keeps an exception, and with it its frames, alive."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    for module in list(sys.modules.values()):
        if type(module) is types.ModuleType and PDB_VARIABLES in module.__dict__:
            yield f"{module.__dict__.get('__name__')}.{PDB_VARIABLES}", module.__dict__[PDB_VARIABLES]
    if shell is None:
        return
    if PDB_VARIABLES in shell.user_ns:
        yield PDB_VARIABLES, shell.user_ns[PDB_VARIABLES]
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
    """Return the last error as one root, or nothing."""
    objects = tuple(value for _, value in error_places(shell))
    error = next((value for value in objects if isinstance(value, BaseException)), None)
    if not objects:
        return []
    what = type(error).__name__ if error is not None else "traceback"
    return [LiveRoot("error", LABEL, objects, _cell_of(error, shell), what)]


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
        if type(value) is types.FrameType:
            found.frames[id(value)] = value
            todo.append(value.f_back)
        elif type(value) is types.TracebackType:
            todo += [value.tb_frame, value.tb_next]
        elif type(value) is dict:
            todo += value.values()
        elif isinstance(value, BaseException):
            found.errors[id(value)] = value
            todo += [value.__traceback__, value.__context__, value.__cause__, *getattr(value, "exceptions", ())]
    return found
