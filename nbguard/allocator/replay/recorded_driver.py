"""A driver that answers as the recorded one did: whether there was room, and where, stands in the trace."""

from __future__ import annotations

from nbguard.allocator.snapshot.snapshot import Event

NOWHERE = 1 << 55
"""Addresses for what the model asks and the recorded program did not."""


class TraceDriver:
    """Answers from `events`. `position` is that of the first event of the running call; `done` holds what it caused so far.

    `fresh` is where a range lies that is reserved before memory goes back for the same request; None where nobody knows.
    """

    def __init__(self, events: tuple[Event, ...], done: list[Event]) -> None:
        self.events = events
        self.done = done
        self.position = 0
        self.fresh: int | None = None
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
    """Return whether the driver had no room, if this is what came next."""
    return action in ("segment_free", "segment_unmap", "oom")
