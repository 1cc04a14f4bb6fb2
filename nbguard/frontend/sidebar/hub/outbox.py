"""Messages from the hub to the views, made and sent. Imported with the first one, as the protocol comes with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nbguard.frontend.sidebar.protocol.messages import (
    Acknowledged,
    Answer,
    Broadcast,
    Closed,
    HistorySent,
    Queued,
    Refused,
    StateSent,
    TickSent,
    message_of,
    unpacked_message,
)

if TYPE_CHECKING:
    from nbguard.frontend.sidebar.protocol.state import LineHistory, MemoryState, Tick


from nbguard.frontend.sidebar.hub.comms import Channel

_log = logging.getLogger("nbguard")


class Outbox:
    """Sends messages to views. One that cannot be reached is its own loss: nothing is raised."""

    def acknowledge(self, channel: Channel, rid: str) -> None:
        """Say that a request has arrived."""
        self.answer(channel, Acknowledged(rid))

    def queue(self, channel: Channel, rid: str, why: str) -> None:
        """Say that a request waits, and why."""
        self.answer(channel, Queued(rid, why))

    def refuse(self, channel: Channel, rid: str, why: str) -> None:
        """Say that a request is not done, and why."""
        self.answer(channel, Refused(rid, why))

    def answer(self, channel: Channel, message: Answer) -> None:
        """Send the answer to a request to its sender."""
        self._send([channel], message)

    def send_state(self, channels: Iterable[Channel], state: MemoryState) -> None:
        """Send the result of a scan to some views."""
        self._send(channels, StateSent(state))

    def send_tick(self, channels: Iterable[Channel], tick: Tick) -> None:
        """Send the counters to some views."""
        self._send(channels, TickSent(tick))

    def send_history(self, channel: Channel, rid: str, history: LineHistory) -> None:
        """Send the lines over the span that a view has asked for."""
        self.answer(channel, HistorySent(rid, history))

    def say_goodbye(self, channels: Iterable[Channel]) -> None:
        """Say that nothing more comes."""
        self._send(channels, Closed())

    @staticmethod
    def _send(channels: Iterable[Channel], message: Answer | Broadcast) -> None:
        unpacked: dict[str, Any] = unpacked_message(message)
        for channel in channels:
            try:
                channel.send(unpacked if channel.packs else message_of(message))
            except Exception:  # noqa: BLE001 - as said above
                _log.debug("a sidebar could not be told", exc_info=True)
