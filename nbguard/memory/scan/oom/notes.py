"""Notes that were made at the moment of running out of memory, by `cleanup.apply.oom_observer` and by a simulated device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from nbguard.memory.core.facts import DeviceFacts, Segment
from nbguard.memory.core.oom_facts import OomNote
from nbguard.memory.core.segments.fragmentation import fragmentation, stranded_pages
from nbguard.memory.core.segments.requests import Room
from nbguard.memory.scan.oom.chain import find_in_chain
from nbguard.memory.scan.oom.message import OomText, belongs_to
from nbguard.shell import running_shell

_KEPT = 8
_TOO_MANY = 50_000
"""Blocks of the allocator that are not read any more while an error is being raised: it would take a tenth of a second."""

NOTES: deque[OomNote] = deque(maxlen=_KEPT)
"""The latest notes, the last one at the end: numbers only."""


def note_of(text: OomText) -> OomNote | None:
    """Return the latest note of the failure that an error's text tells of."""
    return next((note for note in reversed(tuple(NOTES)) if belongs_to(note, text)), None)


def with_free_blocks(note: OomNote, blocks: int, read: Callable[[], Iterable[Segment]]) -> OomNote:
    """Return a note with the memory that was free between live blocks. It says so of too many `blocks` without reading them."""
    if blocks > _TOO_MANY:
        return replace(note, unread=f"{blocks:,} blocks: too many to read while the error was raised")
    segments = tuple(segment for segment in read() if not segment.is_private)
    return replace(
        note,
        stranded=fragmentation(segments).stranded,
        largest_free=Room(device=DeviceFacts(device="", name="", segments=segments)).largest().cached,
        pages=stranded_pages(segments),
    )


def ran_out(error: BaseException) -> bool:
    """Say whether an exception is, or was raised because of or after, running out of memory. Quick; never raises."""
    try:
        return find_in_chain(error) is not None
    except Exception:  # noqa: BLE001 - not an exception at all, or one that is not whole
        return False


def cell_now() -> int | None:
    """Return the number of the cell that runs, if a notebook's."""
    shell = running_shell()
    return None if shell is None else len(shell.history_manager.input_hist_parsed) - 1
