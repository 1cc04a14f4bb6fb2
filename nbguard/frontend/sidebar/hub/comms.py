"""Comms as the hub needs them, with the leases of views and the wire. ipykernel's own has three habits that harm here.

It sends all messages of a thread in the name of the cell that runs; it fires IPython's `pre_execute` and `post_execute` for
each message that arrives, also beside a cell, where pyplot then draws what the cell is drawing; and since 7.4 it takes
messages from a subshell back to the thread that published last, where they wait until the cell ends.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from itertools import count
from typing import Any, Protocol

from comm.base_comm import BaseComm

from nbguard.plain_data import fields_of, to_plain

# --- Leases of the views that are open, where each renews its own every few seconds, and is forgotten if it does not.


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


# --- Fast path for unsolicited messages such as ticks, in Jupyter's format: their common parts are made once.
#
# `Session.send` packs four dicts for each message and asks two dozen traits. A tick goes out four times a second, next to a
# fit that has evicted all of that from the processor's caches: there it takes as long as all else in a tick.


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, default=fields_of)
_NOTHING = b"{}"
_JSON = ("json", "orjson")
"""Names of Jupyter's packers that write JSON."""


class UnaskedSender:
    """Sends messages of one type on the kernel's IOPub channel, in the name of no request."""

    def __init__(self, kernel: Any, msg_type: str, topic: bytes) -> None:
        self._kernel = kernel
        self._session = session = kernel.session
        self._topic = topic
        self._pid = os.getpid()
        self._count = count()
        header = session.msg_header(msg_type)
        known = {name: value for name, value in header.items() if name not in ("msg_id", "date")}
        self._id = f"{header['msg_id']}_"
        self._header = _ENCODER.encode(known).removesuffix("}")
        self._can = session.packer in _JSON and not (session.adapt_version or session.metadata or session.debug)

    def send(self, content: dict[str, Any]) -> bool:
        """Send a message. False, and nothing is sent: it or the session is one that `Session.send` alone knows how to treat."""
        if not self._can or os.getpid() != self._pid:
            return False
        try:
            packed = _ENCODER.encode(content).encode()
        except (TypeError, ValueError):  # something that only Jupyter packs, not a number, half a character
            return False
        date = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        header = f'{self._header}, "msg_id": "{self._id}{next(self._count)}", "date": "{date}"}}'
        parts = [header.encode(), _NOTHING, _NOTHING, packed]
        self._session.send_raw(self._kernel.iopub_socket, parts, ident=self._topic)
        return True


class ThreadSafeComm(BaseComm):
    """A comm that may publish from any thread, and hands messages to its callback in the thread that has them.

    Messages may have dataclasses in them: they are packed as the fields that they have.
    """

    packs = True

    def __init__(self, kernel: Any, **keys: Any) -> None:
        self.kernel = kernel  # by this name for ipywidgets 7
        self._answered = threading.local()
        super().__init__(**keys)

    def open(self, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
        """Open the other end; take messages from it. Before ipykernel 6.18 the kernel's manager isn't the one of comms."""
        super().open(data, metadata, buffers)
        self.kernel.comm_manager.register_comm(self)

    def close(self, *args: Any, **keys: Any) -> None:
        """Close the other end; take no more messages."""
        super().close(*args, **keys)
        self.kernel.comm_manager.comms.pop(self.comm_id, None)

    def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any) -> None:
        """Publish a message: in the name of the message that is being answered in this thread, if one is."""
        content = {"data": data or {}, "comm_id": self.comm_id, **keys}
        parent = self.kernel.get_parent() if msg_type == "comm_open" else getattr(self._answered, "message", {})
        if msg_type == "comm_msg" and not (parent or metadata or buffers) and self._unasked.send(content):
            return
        content["data"] = {name: to_plain(field) for name, field in content["data"].items()}
        self.kernel.session.send(
            self.kernel.iopub_socket, msg_type, content, metadata=metadata, parent=parent, ident=self.topic, buffers=buffers
        )

    @cached_property
    def _unasked(self) -> UnaskedSender:
        return UnaskedSender(self.kernel, "comm_msg", self.topic)

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Hand a message to the callback."""
        if self._msg_callback is None:
            return
        self._answered.message = msg
        try:
            self._msg_callback(msg)
        finally:
            del self._answered.message


# --- The wire to the panels: a comm of a fixed id, and the control channel, heard while a cell runs.
#
# The comm is neither opened nor closed towards the browser: whoever knows its id may listen and send, also after a reload of
# the page.


COMM = "nbguard"
"""Id of the comm that every panel and every kernel know."""


class PanelChannel(ThreadSafeComm):
    """Takes messages of panels from the shell channel, subshells and the control channel, and publishes to all of them.

    `receive` is called with the content of each message, in the thread that has it; it must not take long, nor raise.
    """

    def __init__(self, kernel: Any, receive: Callable[[Any, PanelChannel], None]) -> None:
        super().__init__(kernel, target_name=COMM, comm_id=COMM, primary=False)
        self._receive = receive
        self._on_control = self._take_control  # one object: a bound method is another at each access
        kernel.comm_manager.register_comm(self)
        kernel.control_handlers.setdefault("comm_msg", self._on_control)

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Take a message. Answers are in nobody's name: they are for every panel to see."""
        content = msg.get("content")
        self._receive(content.get("data") if type(content) is dict else None, self)

    def close(self, *_: Any, **__: Any) -> None:
        """Take no more messages. Nothing is announced: other clients know of no comm that could be closed."""
        if self._closed:
            return
        self._closed = True
        handlers, manager = self.kernel.control_handlers, self.kernel.comm_manager
        if handlers.get("comm_msg") is self._on_control:
            del handlers["comm_msg"]
        if manager.comms.get(COMM) is self:
            manager.unregister_comm(self)

    def handle_close(self, _: dict[str, Any]) -> None:
        """Register again, as a browser that closes the comm must not end the channel."""
        self._closed = False
        self.kernel.comm_manager.register_comm(self)

    def _take_control(self, _stream: Any, _ident: Any, msg: dict[str, Any]) -> None:
        content = msg.get("content")
        if type(content) is dict and content.get("comm_id") == COMM:
            self.handle_msg(msg)
