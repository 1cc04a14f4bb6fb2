"""The last calls of a rank in a mapped file: they outlive a process that is killed, and others may read them at any time."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from nbguard.memory.processes import Process
from nbguard.ranks.analysis.facts import CollectiveCall
from nbguard.ranks.job_folder import OWNER, owner, owner_of

WatchState: TypeAlias = Literal["running", "ended", "raised"]

_STATES: tuple[WatchState, ...] = ("running", "ended", "raised")
_HEAD = struct.Struct("<qqq")  # behind the file's owner: rank, index in _STATES, number of calls ever
_CALL = struct.Struct(
    "<qqq??16s24s12s32s120s"
)  # number, position, elements, done, point to point, group, name, dtype, detail, place
_KEPT = 64
_START = OWNER.size + _HEAD.size
_DONE = struct.Struct("<?")
_DONE_AT = struct.calcsize("<qqq")


class CallLog:
    """The calls of this process, in a file that goes with `close`."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._count = 0
        fresh = path.with_suffix(".new")
        fresh.write_bytes(owner() + _HEAD.pack(rank, 0, 0) + bytes(_KEPT * _CALL.size))
        fresh.replace(path)  # whole from the start, whoever reads it
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    @property
    def count(self) -> int:
        """Return how many calls have been noted ever."""
        return self._count

    def begin(self, call: CollectiveCall, place: bytes) -> int:
        """Note a call that begins at a line; return its number, for `end`."""
        number = self._count + 1
        at = _START + number % _KEPT * _CALL.size
        numbers = number, call.position, -1 if call.elements is None else call.elements
        texts = call.group.encode(), call.name.encode(), call.dtype.encode(), call.detail.encode(), place
        _CALL.pack_into(self._map, at, *numbers, call.is_done, call.is_p2p, *texts)
        self._count = number
        _HEAD.pack_into(self._map, OWNER.size, self._rank, 0, number)
        return number

    def end(self, number: int) -> None:
        """Note that a call has returned."""
        if number > self._count - _KEPT:
            _DONE.pack_into(self._map, _START + number % _KEPT * _CALL.size + _DONE_AT, True)

    def leave(self, state: WatchState) -> None:
        """Note how the watch has ended. The file stays: others may still look for this rank's calls."""
        _HEAD.pack_into(self._map, OWNER.size, self._rank, _STATES.index(state), self._count)

    def calls(self) -> tuple[CollectiveCall, ...]:
        """Return the last calls, in their order."""
        return _calls(bytes(self._map))

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()


@dataclass(frozen=True, slots=True)
class LoggedCalls:
    """The log of another process."""

    process: Process
    rank: int
    state: WatchState
    calls: tuple[CollectiveCall, ...]


def read_log(path: Path) -> LoggedCalls | None:
    """Return the log in a file; None if there is none that can be read."""
    try:
        data = path.read_bytes()
        process = owner_of(data)
        rank, state, _ = _HEAD.unpack_from(data, OWNER.size)
        if process is None or not 0 <= state < len(_STATES):
            return None
        return LoggedCalls(process, rank, _STATES[state], _calls(data))
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def _calls(data: bytes) -> tuple[CollectiveCall, ...]:
    numbered = []
    for place in range(_KEPT):
        number, position, elements, is_done, is_p2p, *texts = _CALL.unpack_from(data, _START + place * _CALL.size)
        if number:
            group, name, dtype, detail, line = (text.rstrip(b"\0").decode("utf-8", "replace") for text in texts)
            call = CollectiveCall(
                group=group,
                position=position,
                name=name,
                elements=None if elements < 0 else elements,
                dtype=dtype,
                detail=detail,
                place=line,
                is_done=is_done,
                is_p2p=is_p2p,
            )
            numbered.append((number, call))
    return tuple(call for _, call in sorted(numbered, key=lambda each: each[0]))
