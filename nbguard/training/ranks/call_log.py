"""The last calls of a rank, in a part of its mapped file, where they outlive a killed process and others may read them.

A call is four numbers. Its words, the same for each such call from the same line, are written once, to a table behind them.
"""

from __future__ import annotations

import mmap
import struct
from itertools import count

from nbguard.training.ranks.analysis.facts import CollectiveCall

KEPT = 64  # calls
NUMBERS = 4  # of each call: its own, its position, the entry of its words, and its own once more when it has returned
_SLOTS_SIZE = KEPT * NUMBERS * 8
_ENTRY = struct.Struct("<q?qq16s24s12s32s120s")  # its number, point to point, elements, peer, group, name, dtype, detail, place
TABLE = 1024
"""Entries of the table: of more different calls the words of the first are written over."""

CALLS_SIZE = _SLOTS_SIZE + TABLE * _ENTRY.size
"""Bytes that the calls take, where all of the table is used."""


class CallLog:
    """The last calls of a rank, at a place of a mapped file, which is a multiple of 8."""

    def __init__(self, mapped: mmap.mmap, at: int) -> None:
        self._map = mapped
        self._table = at + _SLOTS_SIZE
        self._entries = count(1)
        self.slots = memoryview(mapped)[at : self._table].cast("q")
        """Of each kept call NUMBERS numbers; the call `number` stands at `number % KEPT`. `CallHook` writes them."""
        self.numbers = count(1)
        """The numbers of the calls to come."""
        self.times: dict[int, int] = {}
        """How often the call of each entry has been noted, by the entry's number. `CallHook` counts."""

    def entry(self, call: CollectiveCall, place: bytes) -> int:
        """Write the words of calls of this kind from a line; return the number of the entry."""
        number = next(self._entries)
        texts = call.group.encode(), call.name.encode(), call.dtype.encode(), call.detail.encode(), place
        elements = -1 if call.elements is None else call.elements
        peer = -1 if call.peer is None else call.peer
        _ENTRY.pack_into(self._map, self._table + number % TABLE * _ENTRY.size, number, call.is_p2p, elements, peer, *texts)
        return number

    @property
    def count(self) -> int:
        """How many calls have been noted ever."""
        return max(self.slots[::NUMBERS])

    def waits(self) -> bool:
        """Say whether the last call has not returned."""
        return max(self.slots[::NUMBERS]) > max(self.slots[3::NUMBERS])

    def read(self) -> tuple[CollectiveCall, ...]:
        """Return the last calls, in their order."""
        slots = self.slots.tolist()
        calls = sorted(slots[at : at + NUMBERS] for at in range(0, len(slots), NUMBERS) if slots[at])
        read = (self._call(position, entry, returned == number) for number, position, entry, returned in calls)
        return tuple(call for call in read if call is not None)

    def since(self, before: dict[int, int]) -> list[tuple[CollectiveCall, int]]:
        """Return the kinds of calls that were noted since `times` was as `before`, each with their number."""
        added = {entry: times - before.get(entry, 0) for entry, times in self.times.items()}
        calls = ((self._call(0, entry, is_done=True), times) for entry, times in added.items() if times)
        return [(call, times) for call, times in calls if call is not None]

    def _call(self, position: int, entry: int, is_done: bool) -> CollectiveCall | None:
        """Return a call with its words, or None if others were written over them."""
        number, is_p2p, elements, peer, *texts = _ENTRY.unpack_from(self._map, self._table + entry % TABLE * _ENTRY.size)
        if number != entry:
            return None
        group, name, dtype, detail, place = (text.rstrip(b"\0").decode("utf-8", "replace") for text in texts)
        return CollectiveCall(
            group=group,
            position=position,
            name=name,
            elements=None if elements < 0 else elements,
            dtype=dtype,
            detail=detail,
            peer=None if peer < 0 else peer,
            place=place,
            is_done=is_done,
            is_p2p=is_p2p,
        )

    def close(self) -> None:
        """Let go of the file."""
        self.slots.release()
