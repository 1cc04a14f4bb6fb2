"""The events of a trace as columns of numbers, since a large trace has millions and most commands read none of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

Event = tuple[str, int, int, int]
"""(action, address, bytes, stream) of an entry; the second of an `oom` is the device's free bytes, -1 if not recorded."""

ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("oom", "snapshot"),
)
"""Actions of the allocator in a trace (`TraceEntry::Action`). Other entries, such as annotations, are only counted."""

CODES = {action: code for code, action in enumerate(ACTIONS)}


@dataclass(frozen=True, slots=True)
class Events(Sequence[Event]):
    """A sequence of events that makes each tuple when it is asked for."""

    actions: array[int] = field(default_factory=lambda: array("B"))  # index in `ACTIONS`
    addresses: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))  # bytes
    streams: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        """The four columns, in the order of an event."""
        return self.actions, self.addresses, self.sizes, self.streams

    def extend(self, *columns: Iterable[int]) -> None:
        """Append events, given as codes of actions, addresses, sizes and streams."""
        for column, more in zip(self.columns, columns, strict=True):
            column.extend(more)

    def __len__(self) -> int:
        return len(self.actions)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if isinstance(index, slice):
            return Events(*(column[index] for column in self.columns))
        return ACTIONS[self.actions[index]], self.addresses[index], self.sizes[index], self.streams[index]

    def __iter__(self) -> Iterator[Event]:
        return zip(map(ACTIONS.__getitem__, self.actions), self.addresses, self.sizes, self.streams, strict=True)
