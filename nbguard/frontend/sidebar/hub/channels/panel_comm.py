"""The wire to the panels: a comm of a fixed id, and the control channel, heard while a cell runs.

The comm is neither opened nor closed towards the browser: whoever knows its id may listen and send, also after a reload of
the page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbguard.frontend.sidebar.hub.channels.comms import ThreadSafeComm

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
        handlers, manager = self._kernel.control_handlers, self._kernel.comm_manager
        if handlers.get("comm_msg") is self._on_control:
            del handlers["comm_msg"]
        if manager.comms.get(COMM) is self:
            manager.unregister_comm(self)

    def handle_close(self, _: dict[str, Any]) -> None:
        """Register again, as a browser that closes the comm must not end the channel."""
        self._closed = False
        self._kernel.comm_manager.register_comm(self)

    def _take_control(self, _stream: Any, _ident: Any, msg: dict[str, Any]) -> None:
        content = msg.get("content")
        if type(content) is dict and content.get("comm_id") == COMM:
            self.handle_msg(msg)
