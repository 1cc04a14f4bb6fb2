"""The segments of PyTorch's allocators, from the snapshots of any version, and the lines that allocated their blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from nbguard.memory.core.facts import Block, Segment
from nbguard.memory.scan.libraries import library_paths
from nbguard.render.markup import line_words
from nbguard.texts import running_shell

# --- Lines that allocated blocks, if the allocator's history is recorded, and for each block the user's innermost line


class Sites:
    """Writes stacks of the allocator as `In[7], line 3 in step()`. One instance serves one scan."""

    def __init__(self) -> None:
        self._cells: Mapping[str, int] = getattr(getattr(running_shell(), "compile", None), "_filename_map", {})
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


# --- segments


def listed_segments(*pool: Any) -> list[dict[str, Any]]:
    """Return the segments that PyTorch lists, of all pools or of one, without the trace, which can take a second to copy."""
    torch: Any = sys.modules["torch"]
    try:
        snapshot = torch.cuda.memory_snapshot(*pool, include_traces=False)
    except TypeError:  # before 2.11: the call lists segments alone
        snapshot = torch.cuda.memory_snapshot(*pool)
    found: list[dict[str, Any]] = snapshot if type(snapshot) is list else snapshot.get("segments", [])
    return found


def read_segments(listed: Iterable[Mapping[str, Any]]) -> dict[int, tuple[Segment, ...]]:
    """Return the segments of a snapshot by device."""
    by_device: dict[int, list[Segment]] = {}
    sites = Sites()
    for segment in listed:
        address = segment["address"]
        blocks = []
        for block in segment["blocks"]:
            address = block.get("address", address)
            site = sites.of(_stack(block)) if block["state"] == "active_allocated" else ""
            blocks.append(
                Block(
                    address=address,
                    size=block["size"],
                    state=block["state"],
                    requested=block.get("requested_size", 0),
                    site=site,
                )
            )
            address += block["size"]
        by_device.setdefault(segment["device"], []).append(
            Segment(
                address=segment["address"],
                total_size=segment["total_size"],
                is_small=segment["segment_type"] == "small",
                is_expandable=bool(segment.get("is_expandable")),
                blocks=tuple(blocks),
                stream=segment.get("stream", 0),
                pool=tuple(segment.get("segment_pool_id", (0, 0))),
            )
        )
    return {device: tuple(segments) for device, segments in by_device.items()}


def _stack(block: Any) -> Any:
    """Return the Python stack that allocated a block, the innermost frame first: empty unless history is recorded."""
    history = block.get("history") or [{}]  # torch 2.0 keeps it there
    return block.get("frames") or history[0].get("frames") or ()
