"""What was written when a memory snapshot was saved: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.memory.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFiles:
    """A snapshot file and the one beside it. `nbytes` is the size of the first; `holders` are named in the second.

    `events` are entries of the allocator's history, of all devices; `unnamed` holders had no room.
    """

    path: str
    file: str
    beside: str
    nbytes: int
    segments: int
    events: int
    holders: int
    unnamed: int
    recording: Recording
