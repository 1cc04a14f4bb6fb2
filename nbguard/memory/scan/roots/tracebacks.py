"""The last error, that is, everything in Python, IPython and marimo that keeps an exception, and with it its frames, alive."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.memory.core.facts import DEBUGGER
from nbguard.memory.scan.heap.kinds import module_namespaces, mro_of, name_of, namespace_of
from nbguard.memory.scan.oom.chain import is_exception, parts_of, slot
from nbguard.memory.scan.pause import pause_main_thread
from nbguard.memory.scan.roots.frames import LiveRoot, frame_locals, is_of_interest
from nbguard.texts import numbers_of_cells

# --- The errors of failed cells that marimo keeps until each cell runs again, and with them all that the failed code had.
#
# Private fields of marimo are read: nothing is known of a release that has them elsewhere.


def errors_of_cells() -> Iterator[BaseException]:
    """Yield the errors that the cells of this thread's marimo notebook ended with. Does not import marimo."""
    try:
        statuses = [cell._run_result_status for cell in tuple(_context().graph.cells.values())]
        errors = [status.exception for status in statuses]
    except (AttributeError, RuntimeError):  # RuntimeError: cells came or went in another thread
        return
    yield from (error for error in errors if isinstance(error, BaseException))


def machinery() -> Iterator[Any]:
    """Yield the objects that run this thread's notebook in marimo, which each element of its interface leads to."""
    context = _context()
    kernel = getattr(context, "_kernel", None)
    yield from (each for each in (context, kernel, getattr(kernel, "graph", None)) if each is not None)


def _context() -> Any:
    """Return marimo's context of this thread; None where there is none."""
    module = sys.modules.get("marimo._runtime.context.types")
    return getattr(module, "safe_get_context", lambda: None)()


LABEL = "last error"
PDB_VARIABLES = "__pdb_convenience_variables"
"""Since Python 3.12 the debugger leaves the frame and the exception it looked at in the globals of the code it stopped in."""
_SYS_NAMES = ("last_exc", "last_value", "last_traceback", "last_type")


def error_holders(shell: Any) -> Iterator[Any]:
    """Yield all that holds the last error: Python's own record, a debugger's leftovers, IPython's printer and last result.

    Where marimo runs the cells, the errors of all that failed.
    """
    yield from (sys.__dict__[name] for name in _SYS_NAMES if sys.__dict__.get(name) is not None)
    yield from _kept_by_debugger(shell)
    if shell is None:
        yield from errors_of_cells()
        return
    printers = [getattr(shell, name, None) for name in ("InteractiveTB", "SyntaxTB")]
    values = [getattr(printer, name, None) for printer in printers for name in ("tb", "evalue", "pdb")]
    yield from (value for value in values if value is not None and type(value) is not type)
    result = shell.last_execution_result
    for name in ("error_in_exec", "error_before_exec"):
        value = None if result is None else result.__dict__.get(name)
        if value is not None:
            yield value


def _kept_by_debugger(shell: Any) -> Iterator[Any]:
    if sys.version_info < (3, 12):
        return
    spaces = [*module_namespaces().values(), *(() if shell is None else (shell.user_ns,))]
    yield from {id(space): space[PDB_VARIABLES] for space in spaces if type(space.get(PDB_VARIABLES)) is dict}.values()


def error_roots(shell: Any) -> list[LiveRoot]:
    """Return the last error as one root, and debuggers left over from `set_trace()`, or nothing."""
    tracers = (*(frame.f_trace for frame in traced_frames()), *kept_debuggers())
    debuggers = [LiveRoot(kind="error", label=DEBUGGER, objects=tracers, what="its last stop")] if tracers else []
    objects = tuple(error_holders(shell))
    error = next((value for value in objects if is_exception(value)), None)
    if not objects:
        return debuggers
    what = name_of(type(error)) if error is not None else "traceback"
    return [*debuggers, LiveRoot(kind="error", label=LABEL, objects=objects, cell=_cell_of(error, shell), what=what)]


def traced_frames() -> list[types.FrameType]:
    """Return the running frames of this thread on which a debugger that ended left its trace function.

    `set_trace()` puts it on every frame up to the outermost, `continue` takes it off all but that one.
    """
    frames = []
    frame = sys._getframe() if sys.gettrace() is None and "bdb" in sys.modules else None
    while frame is not None:
        trace = frame.f_trace
        if type(trace) is types.MethodType and sys.modules["bdb"].Bdb in mro_of(type(trace.__self__)):
            frames.append(frame)
        frame = frame.f_back
    return frames


def kept_debuggers() -> list[Any]:
    """Return the debugger that `pdb` keeps to use again, with the frames at which it stopped last; nothing while it runs.

    Python does so from 3.14 on.
    """
    pdb = sys.modules.get("pdb")
    debugger = None if pdb is None or sys.gettrace() is not None else namespace_of(pdb.Pdb).get("_last_pdb_instance")
    monitoring: Any = getattr(sys, "monitoring", None)  # that another debugger may run by
    runs = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return [] if debugger is None or runs else [debugger]


def _cell_of(error: BaseException | None, shell: Any) -> int | None:
    """Return the number of the cell that raised the error."""
    numbers = numbers_of_cells(shell)
    traceback = None if error is None else slot(error, "__traceback__")
    while traceback is not None:
        number = numbers.get(traceback.tb_frame.f_code.co_filename)
        if type(number) is int:
            return number
        traceback = traceback.tb_next
    return None


def final_roots(error: BaseException, words: Callable[[Any], str]) -> list[LiveRoot]:
    """Return a root, such as `main() → net`, for each variable of the functions that an error passed as it ended its process.

    The outermost functions come first. Frames of modules are left out, as their variables are globals, which have roots.
    `words` describes an object.
    """
    frames = dict[int, types.FrameType]()
    for each in parts_of_errors([error]).errors.values():
        trace = slot(each, "__traceback__")
        while trace is not None:
            frames.setdefault(id(trace.tb_frame), trace.tb_frame)
            trace = trace.tb_next
    ours = filter(is_of_interest, frames.values())
    named = [(frame.f_code.co_name, *variable) for frame in ours for variable in frame_locals(frame).items()]
    return [
        LiveRoot(kind="frame", label=f"{function}() → {name}", objects=(value,), what=words(value))
        for function, name, value in named
    ]


@dataclass(frozen=True)
class ErrorParts:
    """The frames and exceptions of errors, by id."""

    frames: dict[int, types.FrameType]
    errors: dict[int, BaseException]


def error_parts(shell: Any) -> ErrorParts:
    """Return the frames and exceptions of the last error, of chained and grouped ones and of the debugger, too."""
    return parts_of_errors(error_holders(shell))


def parts_of_errors(holders: Iterable[Any]) -> ErrorParts:
    """Return the frames and exceptions that exceptions, tracebacks, frames and the leftovers of a debugger hold."""
    parts = ErrorParts({}, {})
    visited: set[int] = set()
    todo = list(holders)
    while todo:
        value = todo.pop()
        if value is None or id(value) in visited:
            continue
        visited.add(id(value))
        if type(value) is dict:  # leftovers of the debugger
            todo += value.values()
        elif type(value) is types.FrameType:
            parts.frames[id(value)] = value
            todo.append(value.f_back)
        elif type(value) is types.TracebackType:
            todo += [value.tb_frame, value.tb_next]
        elif is_exception(value):
            parts.errors[id(value)] = value
            todo += [slot(value, name) for name in ("__traceback__", "__context__", "__cause__")]
            todo += parts_of(value)
    return parts


def parts_by_id(ids: set[int]) -> ErrorParts:
    """Return the frames and exceptions with these ids, if they still live."""
    parts = ErrorParts({}, {})
    with pause_main_thread():
        for obj in gc.get_objects():
            if id(obj) in ids:
                if type(obj) is types.FrameType:
                    parts.frames[id(obj)] = obj
                elif is_exception(obj):
                    parts.errors[id(obj)] = obj
        obj = None  # before the main thread goes on: it may be one of its tensors
    return parts
