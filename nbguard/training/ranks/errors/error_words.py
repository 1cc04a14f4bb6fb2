"""An exception as facts, with its words, and the user's line that raised it. Nothing of the exception is kept."""

from __future__ import annotations

import traceback

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.render.words import clean
from nbguard.training.ranks.analysis.facts import Caller
from nbguard.training.ranks.analysis.flight_dump import caller_of

_MESSAGE = 1000


def error_words(error: BaseException) -> str:
    """Return an exception in words: "ValueError: …"."""
    name, message = type(error).__name__, " ".join(part for part in error.args if type(part) is str)
    return clean(f"{name}: {message}" if message else name, _MESSAGE)


def raised_at(error: BaseException) -> tuple[str, Caller]:
    """Return the innermost line of the user's that an exception has passed, and the part of DDP that it came from."""
    frames = [
        {"filename": frame.f_code.co_filename, "line": line, "name": frame.f_code.co_name}
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return Sites().of(frames[::-1]), caller_of(frames[::-1])
