"""A driver that answers as the recorded one did; the trace shows whether there was room, and at which address."""

from __future__ import annotations

from nbguard.memory.allocator.snapshot.events import Event

NOWHERE = 1 << 55
"""From here on lie the addresses of memory that the model asks for and the recorded program did not."""


class TraceDriver:
    """A driver whose answers are taken from the events of a trace."""

    def __init__(self, events: tuple[Event, ...], done: list[Event]) -> None:
        self.events = events  # of the whole trace
        self.done = done  # the model's events of the running call so far
        self.position = 0  # in `events`, of the first event of the running call
        self.fresh: int | None = None  # address of a range reserved before memory goes back for the same request, if known
        self._nowhere = NOWHERE

    def _expected(self) -> Event:
        index = self.position + len(self.done)
        return self.events[index] if index < len(self.events) else ("end", 0, 0, 0)

    def allocate(self, size: int) -> int | None:  # noqa: D102
        action, address, recorded, _ = self._expected()
        if action == "segment_alloc" and recorded == size:
            return address
        return None if _is_refusal(action) else self._elsewhere(size)

    def release(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def reserve(self, size: int) -> int:  # noqa: D102
        action, address, _, _ = self._expected()
        if action == "segment_map":
            return address
        place, self.fresh = self.fresh, None
        return self._elsewhere(size) if place is None or not _is_refusal(action) else place

    def unreserve(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002, D102
        return not _is_refusal(self._expected()[0])

    def unmap(self, address: int, size: int) -> None:  # noqa: D102
        pass

    def free(self) -> int | None:  # noqa: D102
        action, address, _, _ = self._expected()
        return address if action == "oom" else None

    def _elsewhere(self, size: int) -> int:
        address = self._nowhere
        self._nowhere += -(-size // 2**21) * 2**21
        return address


def _is_refusal(action: str) -> bool:
    """Return whether an action shows, as the next event of a request, that the driver had no room."""
    return action in ("segment_free", "segment_unmap", "oom")
