"""Messages in nobody's name are those that `Session.send` would have sent."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.session import Session

from nbguard.frontend.sidebar.hub.comms import UnaskedSender
from nbguard.frontend.sidebar.protocol.state import DevicePeak, JobStatus, TimeMark
from nbguard.plain_data import to_plain

_MARK = TimeMark(kind="cell", label="In[3] µ", t=1.5, peaks=(DevicePeak("cuda:0", 7, True),))


class Socket:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def send_multipart(self, parts: list[bytes], *_: Any, **__: Any) -> None:
        self.sent.append(parts)


def kernel_with(**traits: Any) -> Any:
    return SimpleNamespace(session=Session(key=b"secret", **traits), iopub_socket=Socket())


def received(kernel: Any) -> list[Any]:
    """Return what a client of the same key reads."""
    client = Session(key=b"secret")
    return [client.deserialize(client.feed_identities(parts)[1]) for parts in kernel.iopub_socket.sent]


def _moment(date: datetime | str) -> datetime:
    """Return the date of a message: Jupyter leaves it in words where another library has taken its parser of dates away."""
    return date if isinstance(date, datetime) else datetime.fromisoformat(date.replace("Z", "+00:00"))


def test_a_message_is_the_one_that_the_session_would_have_sent() -> None:
    kernel = kernel_with(username='a "quoted" name')
    sender = UnaskedSender(kernel, "comm_msg", b"comm-nbguard")
    content = {"comm_id": "nbguard", "data": {"op": "tick", "marks": (_MARK,), "jobs": (JobStatus("r", "Look", "running"),)}}
    assert sender.send(content)
    assert sender.send(content)
    plain = {"comm_id": "nbguard", "data": {name: to_plain(field) for name, field in content["data"].items()}}  # type: ignore[attr-defined]
    kernel.session.send(kernel.iopub_socket, "comm_msg", plain, ident=b"comm-nbguard")

    assert {parts[0] for parts in kernel.iopub_socket.sent} == {b"comm-nbguard"}
    *ours, theirs = received(kernel)
    assert len({message["header"].pop("msg_id") for message in (*ours, theirs)}) == 3
    dates = [message["header"].pop("date") for message in (*ours, theirs)]
    assert all(datetime.now(timezone.utc) - _moment(date) < timedelta(seconds=30) for date in dates), dates
    for message in (*ours, theirs):
        del message["msg_id"]
    assert ours == [theirs, theirs]


@pytest.mark.parametrize("content", [{"loss": float("nan")}, {"name": "\udc80"}, {"when": datetime.now(timezone.utc)}])
def test_what_only_the_session_can_pack_is_left_to_it(content: dict[str, Any]) -> None:
    kernel = kernel_with()
    assert not UnaskedSender(kernel, "comm_msg", b"comm-nbguard").send(content)
    assert kernel.iopub_socket.sent == []


@pytest.mark.parametrize("traits", [{"packer": "pickle", "unpacker": "pickle"}, {"metadata": {"a": 1}}, {"adapt_version": 4}])
def test_a_session_with_rules_of_its_own_keeps_them(traits: dict[str, Any]) -> None:
    kernel = kernel_with(**traits)
    assert not UnaskedSender(kernel, "comm_msg", b"comm-nbguard").send({})


def test_a_process_forked_from_the_kernel_sends_nothing_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_with()
    sender = UnaskedSender(kernel, "comm_msg", b"comm-nbguard")
    assert sender.send({})
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not sender.send({})
