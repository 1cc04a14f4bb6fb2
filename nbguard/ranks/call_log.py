"""The last calls of a rank, in a part of its mapped file: they outlive a process that is killed, and others may read them."""

from __future__ import annotations

import mmap
import struct

from nbguard.ranks.analysis.facts import CollectiveCall

_HEAD = struct.Struct("<qq")  # number of the call, and its position
_WORDS = struct.Struct("<?q?16s24s12s32s120s")  # done, elements, point to point, group, name, dtype, detail, place
_KEPT = 64
_CALL = _HEAD.size + _WORDS.size

CALLS_SIZE = _KEPT * _CALL
"""Bytes that the calls take."""


def packed(call: CollectiveCall, place: bytes) -> bytes:
    """Return a call that begins at a line, all but its position: the same for the same call from the same line."""
    texts = call.group.encode(), call.name.encode(), call.dtype.encode(), call.detail.encode(), place
    return _WORDS.pack(call.is_done, -1 if call.elements is None else call.elements, call.is_p2p, *texts)


class CallLog:
    """The last calls of a rank, at a place of a mapped file."""

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._map = mapped
        self._at = at
        self.count = 0
        """How many calls this process has noted ever; of another process's log it is not known."""

    def begin(self, position: int, words: bytes) -> int:
        """Note a call, as `packed` makes it; return its number, for `end`."""
        number = self.count = self.count + 1
        at = self._at + number % _KEPT * _CALL
        self._map[at : at + _CALL] = _HEAD.pack(number, position) + words
        return number

    def end(self, number: int) -> None:
        """Note that a call has returned."""
        if number > max(0, self.count - _KEPT):
            self._map[self._at + number % _KEPT * _CALL + _HEAD.size] = 1

    def waits(self) -> bool:
        """Say whether the last call that this process has noted has not returned."""
        return self.count > 0 and not self._map[self._at + self.count % _KEPT * _CALL + _HEAD.size]

    def read(self) -> tuple[CollectiveCall, ...]:
        """Return the last calls, in their order."""
        numbered = []
        for place in range(_KEPT):
            at = self._at + place * _CALL
            number, position = _HEAD.unpack_from(self._map, at)
            if number:
                is_done, elements, is_p2p, *texts = _WORDS.unpack_from(self._map, at + _HEAD.size)
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
