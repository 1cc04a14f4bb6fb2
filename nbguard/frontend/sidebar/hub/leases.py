"""Leases of the views that are open, where each renews its own every few seconds, and is forgotten if it does not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

LEASE = 15.0
"""Seconds that a view counts as open after its last message."""

_SEEN, _HIDDEN, _GLANCED = 0.25, 1.0, 5.0
"""Seconds between two ticks while somebody sees them, while all views are hidden, and while all only show a figure or two."""

_MOST = 100
"""Views that are kept count of. More than a user has; a program that makes up names gets no further."""


class Channel(Protocol):
    """A way for messages to get to views: the comm of all panels, or that of one widget."""

    packs: bool  # `send` takes dataclasses in a message, too

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the views at the other end."""


@dataclass(frozen=True, slots=True)
class _Lease:
    channel: Channel
    until: float
    visible: bool
    glance: bool  # a figure or two of a tick is all that it shows


class Leases:
    """The views that look, by the names that they gave themselves. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._first_end = math.inf  # no lease ends before

    def renew(self, client: str, channel: Channel, *, visible: bool, glance: bool = False) -> None:
        """Note that a view looks from now on for `LEASE` seconds, by way of `channel`."""
        with self._lock:
            self._drop_old()
            if client in self._leases or len(self._leases) < _MOST:
                until = self._clock() + LEASE
                self._leases[client] = _Lease(channel, until, visible, glance)
                self._first_end = min(self._first_end, until)

    def end(self, client: str) -> None:
        """Forget a view."""
        with self._lock:
            self._leases.pop(client, None)

    def end_channel(self, channel: Channel) -> None:
        """Forget all views at the end of a way that is no more."""
        with self._lock:
            self._leases = {client: lease for client, lease in self._leases.items() if lease.channel is not channel}

    def clear(self) -> None:
        """Forget everybody."""
        with self._lock:
            self._leases.clear()

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Return the ways to everybody who looks, each once."""
        with self._lock:
            self._drop_old()
            return tuple({id(lease.channel): lease.channel for lease in self._leases.values()}.values())

    @property
    def count(self) -> int:
        """Return how many views look."""
        with self._lock:
            self._drop_old()
            return len(self._leases)

    @property
    def interval(self) -> float | None:
        """Return the seconds between two ticks; None if no view is open."""
        with self._lock:
            self._drop_old()
            if not self._leases:
                return None
            if any(lease.visible for lease in self._leases.values()):
                return _SEEN
            return _GLANCED if all(lease.glance for lease in self._leases.values()) else _HIDDEN

    @property
    def wants_scans(self) -> bool:
        """Say whether any view shows more than a tick's figures."""
        with self._lock:
            self._drop_old()
            return any(not lease.glance for lease in self._leases.values())

    def _drop_old(self) -> None:
        now = self._clock()
        if now >= self._first_end:
            self._leases = {client: lease for client, lease in self._leases.items() if lease.until > now}
            self._first_end = min((lease.until for lease in self._leases.values()), default=math.inf)
