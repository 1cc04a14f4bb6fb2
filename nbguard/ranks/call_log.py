"""The last calls of a rank, in a part of its mapped file: they outlive a process that is killed, and others may read them."""

from __future__ import annotations

import mmap
import struct

from nbguard.ranks.analysis.facts import CollectiveCall

_COUNT = struct.Struct("<q")  # of calls ever
_CALL = struct.Struct(
    "<qqq??16s24s12s32s120s"
)  # number, position, elements, done, point to point, group, name, dtype, detail, place
_KEPT = 64
_DONE = struct.Struct("<?")
_DONE_AT = struct.calcsize("<qqq")

CALLS_SIZE = _COUNT.size + _KEPT * _CALL.size
"""Bytes that the calls take."""


class CallLog:
    """The last calls of a rank, at a place of a mapped file."""

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._map = mapped
        self._at = at
        self._count = int(_COUNT.unpack_from(mapped, at)[0])

    @property
    def count(self) -> int:
        """Return how many calls this process has noted ever."""
        return self._count

    def begin(self, call: CollectiveCall, place: bytes) -> int:
        """Note a call that begins at a line; return its number, for `end`."""
        number = self._count + 1
        numbers = number, call.position, -1 if call.elements is None else call.elements
        texts = call.group.encode(), call.name.encode(), call.dtype.encode(), call.detail.encode(), place
        _CALL.pack_into(self._map, self._place(number), *numbers, call.is_done, call.is_p2p, *texts)
        self._count = number
        _COUNT.pack_into(self._map, self._at, number)
        return number

    def end(self, number: int) -> None:
        """Note that a call has returned."""
        if number > self._count - _KEPT:
            _DONE.pack_into(self._map, self._place(number) + _DONE_AT, True)

    def waits(self) -> bool:
        """Say whether the last call that this process has noted has not returned."""
        return self._count > 0 and not bool(_DONE.unpack_from(self._map, self._place(self._count) + _DONE_AT)[0])

    def read(self) -> tuple[CollectiveCall, ...]:
        """Return the last calls, in their order."""
        numbered = []
        for place in range(_KEPT):
            number, position, elements, is_done, is_p2p, *texts = _CALL.unpack_from(self._map, self._place(place))
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

    def _place(self, number: int) -> int:
        return self._at + _COUNT.size + number % _KEPT * _CALL.size
