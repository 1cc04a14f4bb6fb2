"""The place of this process's main thread, as its line in notebook terms, for how long, and whether it works there."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.render.words import clean, line_words
from nbguard.training.ranks.analysis.facts import Caller
from nbguard.training.ranks.analysis.flight_dump import caller_of

_LINES = 12
_MOMENT = 0.25  # seconds for a working thread to show it


@dataclass(frozen=True, slots=True)
class Standing:
    """The place of a thread."""

    line: str  # the user's innermost line
    function: str  # source of that line, or the function of a library that it has called
    stack: tuple[str, ...]  # all lines, innermost first
    caller: Caller  # the part of DistributedDataParallel that it is in


class MainThread:
    """The main thread of this process, watched by another."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident
        self._task = Path(f"/proc/self/task/{os.getpid()}")  # Linux gives the main thread the number of its process
        self._key: tuple[int, int] | None = None
        self._since = time.monotonic()

    def look(self) -> None:
        """Note since when it has been at its line."""
        frame = self._frame()
        key = None if frame is None else (id(frame.f_code), frame.f_lasti)
        if key != self._key:
            self._key, self._since = key, time.monotonic()

    @property
    def since(self) -> float:
        """Return for how many seconds it has been at its line, as far as looks tell."""
        return time.monotonic() - self._since

    def standing(self) -> Standing | None:
        """Return where it stands."""
        innermost = frame = self._frame()
        if innermost is None:
            return None
        sites, frames, lines = Sites(), [], []
        users: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            if sites.is_users(code.co_filename):
                users = users or frame
            lines.append(line_words(sites.place(code.co_filename), frame.f_lineno, code.co_name))
            frame = frame.f_back
        line = linecache.getline(users.f_code.co_filename, users.f_lineno).strip() if users is not None else ""
        name = f"{innermost.f_code.co_name}()" if users is not innermost or not line else line
        return Standing(sites.of(frames), clean(name, 60), tuple(lines[:_LINES]), caller_of(frames))

    def works(self) -> bool:
        """Say whether it uses the processor, or wakes now and then; waits a moment to see it."""
        before = self._counters()
        time.sleep(_MOMENT)
        after = self._counters()
        return before is not None and before != after

    def _frame(self) -> FrameType | None:
        return None if self._ident is None else sys._current_frames().get(self._ident)

    def _counters(self) -> tuple[str, ...] | None:
        """Return its time on processors and how often it has waited; None where the system does not tell."""
        try:
            fields = (self._task / "stat").read_text().rpartition(")")[2].split()
            status = (self._task / "status").read_text().splitlines()
        except OSError:
            return None
        return (*fields[11:13], *(line for line in status if line.startswith("voluntary_ctxt")))
