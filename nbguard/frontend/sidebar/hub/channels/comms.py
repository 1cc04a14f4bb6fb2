"""Comms as the hub needs them. ipykernel's own has three habits that harm here.

It sends all messages of a thread in the name of the cell that runs; it fires IPython's `pre_execute` and `post_execute` for
each message that arrives, also beside a cell, where pyplot then draws what the cell is drawing; and since 7.4 it takes
messages from a subshell back to the thread that published last, where they wait until the cell ends.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from comm.base_comm import BaseComm

from nbguard.frontend.sidebar.hub.channels.unasked import UnaskedSender
from nbguard.plain_data import to_plain


class ThreadSafeComm(BaseComm):
    """A comm that may publish from any thread, and hands messages to its callback in the thread that has them.

    Messages may have dataclasses in them: they are packed as the fields that they have.
    """

    packs = True

    def __init__(self, kernel: Any, **keys: Any) -> None:
        self._kernel = kernel
        self._answered = threading.local()
        super().__init__(**keys)

    def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any) -> None:
        """Publish a message: in the name of the message that is being answered in this thread, if one is."""
        content = {"data": data or {}, "comm_id": self.comm_id, **keys}
        parent = self._kernel.get_parent() if msg_type == "comm_open" else getattr(self._answered, "message", {})
        if msg_type == "comm_msg" and not (parent or metadata or buffers) and self._unasked.send(content):
            return
        content["data"] = {name: to_plain(field) for name, field in content["data"].items()}
        self._kernel.session.send(
            self._kernel.iopub_socket, msg_type, content, metadata=metadata, parent=parent, ident=self.topic, buffers=buffers
        )

    @cached_property
    def _unasked(self) -> UnaskedSender:
        return UnaskedSender(self._kernel, "comm_msg", self.topic)

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Hand a message to the callback."""
        if self._msg_callback is None:
            return
        self._answered.message = msg
        try:
            self._msg_callback(msg)
        finally:
            del self._answered.message
