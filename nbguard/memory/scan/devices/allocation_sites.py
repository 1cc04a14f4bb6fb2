"""Lines that allocated blocks, if the allocator's history is recorded, and for each block the user's innermost line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from nbguard.memory.scan.libraries import library_paths
from nbguard.render.markup import line_words
from nbguard.texts import numbers_of_cells, running_shell


class Sites:
    """Writes stacks of the allocator as `In[7], line 3 in step()`. One instance serves one scan."""

    def __init__(self) -> None:
        self._cells = numbers_of_cells(running_shell())
        self._libraries = library_paths()

    def of(self, frames: Sequence[Mapping[str, Any]]) -> str:
        """Return the line in words, or an empty string without a stack. `frames` as in a snapshot, the innermost first."""
        shown = [frame for frame in frames if frame.get("line") and not str(frame.get("filename", "")).startswith("??")]
        if not shown:
            return ""
        frame = next((frame for frame in shown if self.is_users(frame["filename"])), shown[0])
        return self.line(frame["filename"], frame["line"], frame["name"])

    def line(self, filename: str, number: int, function: str) -> str:
        """Return a line in words; empty without a number."""
        return line_words(self.place(filename), number, function) if number else ""

    def users_frame(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of the user's own code, from a frame outwards; None without one."""
        while frame is not None and not self.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def place(self, filename: str) -> str:
        """Return a file's name, or the cell that it stands for: `In[7]`."""
        cell = self._cells.get(filename)
        return Path(filename).name if cell is None else f"In[{cell}]"

    def is_users(self, filename: str) -> bool:
        """Say whether a file is a cell or a script of the user's, and no library."""
        return filename in self._cells or not filename.startswith((*self._libraries, "<frozen"))


def stack_of(frame: FrameType | None, deepest: int = sys.maxsize) -> list[dict[str, Any]]:
    """Return at most `deepest` running frames as a snapshot has them, from the innermost, `frame`, outwards."""
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < deepest:
        frames.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
        frame = frame.f_back
    return frames
