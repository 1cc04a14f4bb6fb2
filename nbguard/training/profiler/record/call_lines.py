"""Lines of the user's that led to a call, and calls that look as if they were made in such a line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from nbguard.memory.scan.libraries import library_paths
from nbguard.training.profiler.analysis.time.stacks import COMPREHENSIONS

NAME = "nbguard_call"
"""The name of the calling function, which tells it from the user's."""
_CALL = (lambda function, args, named, __tracebackhide__=True: function(*args, **named)).__code__.replace(co_name=NAME)  # noqa: ARG005


class CallsOnLines:
    """Keeps the code for each line that calls were made in."""

    def __init__(self) -> None:
        self._codes: dict[tuple[CodeType, int], CodeType] = {}

    def at(self, frame: FrameType) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
        """Return a function that calls another one, with these arguments, in the line where a frame is."""
        line = frame.f_code, frame.f_lineno
        code = self._codes.get(line)
        if code is None:
            file, number = line[0].co_filename, line[1]
            code = self._codes[line] = _CALL.replace(co_filename=file, co_firstlineno=number)
        return FunctionType(code, frame.f_globals, NAME, (True,))

    def clear(self) -> None:
        """Forget all lines."""
        self._codes.clear()


class CallLines:
    """Finds the line of the user's that has led to a call."""

    def __init__(self) -> None:
        self._libraries = (*library_paths(), "<frozen")
        self._known: dict[Any, bool] = {}

    def here(self) -> tuple[str, int, str] | None:
        """Return the file, the line and the function of the innermost frame that is no library's, or None."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            is_library = self._known.get(code)
            if is_library is None:
                is_library = self._known[code] = code.co_filename.startswith(self._libraries)
            if not is_library:
                return code.co_filename, frame.f_lineno, _function(code)
            frame = frame.f_back
        return None


def _function(code: CodeType) -> str:
    """Return the name of a function; of a comprehension, that of the function around it."""
    if code.co_name not in COMPREHENSIONS:
        return code.co_name
    around = getattr(code, "co_qualname", code.co_name).split(".")  # Python 3.10 does not know it
    return next((name for name in reversed(around) if name not in (*COMPREHENSIONS, "<locals>")), "<module>")
