"""Calls that Python takes for calls in a line of the user's: it says of a warning where the code stands that has called."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

NAME = "nbguard_call"
"""The name of the function that calls, by which it is told from the user's."""
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
