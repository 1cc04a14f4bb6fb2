"""The history of a simulated device, bounded, in the entries of a snapshot's `device_traces`."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable
from types import FrameType
from typing import Any

from nbguard.memory.allocator.model.allocator import Event

Json = dict[str, Any]

_DEEPEST = 64
"""Frames of a stack that are kept, the innermost."""


class SimulatedHistory:
    """The last `entries` events of a simulated device's allocator, with the Python lines that allocated."""

    def __init__(self, entries: int) -> None:
        self._entries: deque[Json] = deque(maxlen=entries)
        self._lines: dict[tuple[str, int, str], Json] = {}  # each line is one dict, as in PyTorch's own snapshots
        self._at: dict[int, list[Json]] = {}  # stacks of the live blocks by address

    def note(self, events: Iterable[Event], frames: list[Json]) -> None:
        """Note the effect of a request; `frames` tell its origin."""
        now = time.time_ns() // 1000
        for action, address, nbytes, stream in events:
            entry = {"action": action, "addr": address, "size": nbytes, "stream": stream, "time_us": now}
            if action == "oom":
                entry["device_free"] = entry.pop("addr")
            if action == "alloc":
                self._at[address] = frames
            elif action == "free_completed":
                self._at.pop(address, None)
            self._entries.append(entry | {"frames": [] if action.startswith("free") else frames})

    def stack(self) -> list[Json]:
        """Return the lines that run now, the innermost first, without nbguard's own around the request."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("nbguard."):
            frame = frame.f_back
        frames: list[Json] = []
        while frame is not None and len(frames) < _DEEPEST:
            line = (frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
            named = {"filename": line[0], "line": line[1], "name": line[2]}
            frames.append(self._lines.setdefault(line, named))
            frame = frame.f_back
        return frames

    def stack_at(self, address: int) -> list[Json]:
        """Return the lines that allocated the block at an address; none where it is older than the history."""
        return self._at.get(address, [])

    def entries(self) -> list[Json]:
        """Return the entries, oldest first."""
        return list(self._entries)
