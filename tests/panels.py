"""A sidebar as a kernel knows it, for tests: says what a panel says, on any channel, and hears what is published."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from jupyter_client import BlockingKernelClient

from tests.kernels import Kernel

Message = dict[str, Any]

HUB = "__import__('nbguard').frontend.notebook.session.hub_of(get_ipython())"
_SETTLED = f"(lambda hub: hub._settling is None and not hub._jobs._pending and hub._jobs._running is None)({HUB})"
"""The sidebar has looked at what the last cell has left: 0.3 s after the cell, planned before the cell's reply."""
_HELLO_EVERY = 4.0
"""Seconds: as a view, it goes on saying that it looks."""


class Panel:
    """A client of a kernel of its own, beside the one that runs cells. `heard` has all that was published since it is there."""

    def __init__(self, kernel: Kernel) -> None:
        self.client = BlockingKernelClient(connection_file=kernel.client.connection_file)
        self.client.load_connection_file()
        self.client.start_channels()
        self.name = uuid.uuid4().hex
        self.heard: list[tuple[float, Message]] = []
        self._hello: Callable[..., object] | None = None
        self._hello_at = 0.0
        self._new = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._wait_until_heard()

    def _wait_until_heard(self) -> None:
        for _ in range(200):
            self.tell({"op": "ask whether I am heard", "rid": self.name})
            if self._find(lambda: self.data("refused") or None, 0.1):
                self.heard.clear()
                return
        raise AssertionError("the hub does not answer")

    def _listen(self) -> None:
        while not self._stopped:
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            with self._new:
                self.heard.append((time.time(), message))
                self._new.notify_all()

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()
        self.client.stop_channels()

    # --- what it says -----------------------------------------------------------------------------------------------------

    def tell(
        self, data: object, *, channel: str = "control", comm: str = "nbguard", kind: str = "comm_msg", **header: Any
    ) -> str:
        """Send a comm message; return its id."""
        message = self.client.session.msg(kind, {"comm_id": comm, "data": data})
        message["header"].update(header)
        getattr(self.client, f"{channel}_channel").send(message)
        return str(message["header"]["msg_id"])

    def hello(self, *, visible: bool = True, again: bool = True, **way: Any) -> None:
        """Say that it looks; `again`: every few seconds, with the heap that it has by then, as a view does."""
        self._hello = lambda **has: self.tell({"op": "hello", "client": self.name, "visible": visible, **has}, **way)
        self._say_hello()
        if not again:
            self._hello = None

    def _say_hello(self, **has: Any) -> None:
        if self._hello is not None:
            self._hello_at = time.monotonic()
            self._hello(**has)

    def _last_heap(self) -> dict[str, Any]:
        """Return what a view says of the last heap that it has heard."""
        return next(({key: each["heap"][key] for key in ("boot", "heap")} for each in self.data("heap")[::-1]), {})

    def bye(self) -> None:
        self._hello = None
        self.tell({"op": "bye", "client": self.name})

    def ask(self, op: str, *, way: dict[str, Any] | None = None, rid: str = "", **content: Any) -> str:
        """Send a request; return its `rid`."""
        rid = rid or uuid.uuid4().hex[:12]
        self.tell({"op": op, "rid": rid, **content}, **(way or {}))
        return rid

    # --- what it hears ----------------------------------------------------------------------------------------------------

    def data(self, *ops: str, rid: str | None = None) -> list[Message]:
        """Return what the hub has said: of these kinds, in answer to `rid`."""
        said = [message["content"]["data"] for _, message in list(self.heard) if _is_hubs(message)]
        return [each for each in said if (not ops or each["op"] in ops) and (rid is None or each.get("rid") == rid)]

    def wait(self, *ops: str, rid: str | None = None, within: float = 20.0, count: int = 1) -> Message:
        """Return the `count`-th message of these kinds, waiting for it."""

        def found() -> Message | None:
            messages = self.data(*ops, rid=rid)
            return messages[count - 1] if len(messages) >= count else None

        answer = self._find(found, within)
        assert answer is not None, f"no {ops} for {rid} within {within} s; heard {self.data(rid=rid)[-5:]}"
        return answer

    def until(self, what: Callable[[Message], bool], op: str = "tick", within: float = 20.0) -> Message:
        """Return the first message of a kind from now on of which something is true."""
        start = len(self.data(op))
        answer = self._find(lambda: next((each[op] for each in self.data(op)[start:] if what(each[op])), None), within)
        assert answer is not None, f"no such {op} within {within} s; the last: {self.data(op)[-1:]}"
        return answer

    def heap(self, what: Callable[[Message], bool] = lambda _: True, within: float = 20.0) -> Message:
        """Return the last heap of which something is true, waiting for one."""
        answer = self._find(
            lambda: next((each["heap"] for each in self.data("heap")[::-1] if what(each["heap"])), None), within
        )
        assert answer is not None, f"no such heap within {within} s; the last: {self.data('heap')[-1:]}"
        return answer

    def look(self) -> Message:
        """Have the heap looked at and return it."""
        now = time.time()
        self.ask("refresh")
        return self.heap(lambda heap: heap["t"] > now and heap["heap"] > 0)

    def row(self, label: str) -> Message:
        """Return how a request names a holder of the heap as it is now."""
        heap = self.look()
        return {"heap": heap["heap"], "ids": [next(row["id"] for row in heap["holders"] if row["label"] == label)]}

    def plan(self, action: str, **content: Any) -> Message:
        """Ask for a plan and return it."""
        return self.wait("plan", rid=self.ask("plan", action=action, **content))["plan"]  # type: ignore[no-any-return]

    def apply(self, plan: Message, within: float = 20.0) -> Message:
        """Apply a plan and return what came of it."""
        assert plan["token"], plan
        return self.wait("done", rid=self.ask("apply", token=plan["token"]), within=within)["outcome"]  # type: ignore[no-any-return]

    def widget(self, comm: str, op: str, rid: str, within: float = 20.0) -> Message:
        """Return what a widget's comm says in answer to `rid`, waiting for it."""

        def found() -> Message | None:
            said = [
                m["content"] for _, m in list(self.heard) if m["msg_type"] == "comm_msg" and m["content"]["comm_id"] == comm
            ]
            answers = [each["data"]["content"] for each in said if each["data"].get("method") == "custom"]
            return next((each for each in answers if (each["op"], each.get("rid")) == (op, rid)), None)

        answer = self._find(found, within)
        assert answer is not None, f"no {op} of the widget within {within} s"
        return answer  # type: ignore[no-any-return]

    def statuses(self) -> list[tuple[str, str]]:
        """Return (state, kind of the message it is about) of what the kernel has called itself."""
        found = [message for _, message in list(self.heard) if message["msg_type"] == "status"]
        return [(message["content"]["execution_state"], message["parent_header"].get("msg_type", "")) for message in found]

    def calls_itself(self, *status: str, within: float = 20.0) -> bool:
        """Say whether the kernel calls itself this state last, or soon: about a message of this kind, if one is given."""
        return bool(self._find(lambda: any(each[: len(status)] == status for each in self.statuses()[-1:]) or None, within))

    def catch_up(self) -> None:
        """Return when all that was published until now has been heard."""
        self.wait("ack", rid=self.ask("cancel"))

    def _find(self, find: Callable[[], Any], within: float) -> Any:
        until = time.monotonic() + within
        with self._new:
            while (found := find()) is None and (left := until - time.monotonic()) > 0:
                if time.monotonic() > self._hello_at + _HELLO_EVERY:
                    self._say_hello(**self._last_heap())
                self._new.wait(min(left, _HELLO_EVERY))
        return found


def settle(kernel: Kernel) -> None:
    """Wait until the sidebar has looked at what the last cell has left."""
    end = time.monotonic() + 60
    while not kernel.value(_SETTLED):
        assert time.monotonic() < end
        time.sleep(0.05)


def _is_hubs(message: Message) -> bool:
    return message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == "nbguard"
