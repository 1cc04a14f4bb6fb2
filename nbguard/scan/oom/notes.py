"""Notes that were made at the moment of running out of memory: read here, made by `cleanup.apply.oom_observer`."""

from __future__ import annotations

from collections import deque

from nbguard.memory.oom_facts import OomNote
from nbguard.scan.oom.chain import find_in_chain
from nbguard.scan.oom.message import OomText, belongs_to
from nbguard.shell import running_shell

_KEPT = 8

NOTES: deque[OomNote] = deque(maxlen=_KEPT)
"""The latest notes, the last one at the end: numbers only."""


def note_of(text: OomText) -> OomNote | None:
    """Return the latest note of the failure that an error's text tells of."""
    return next((note for note in reversed(tuple(NOTES)) if belongs_to(note, text)), None)


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
