"""The meeting place of this job's ranks, read from the variables and from the listeners; nothing is connected to."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from nbguard.render.markup import clean
from nbguard.training.ranks.analysis.flight_dump import CALL, MeetingPoint, PortOwner
from nbguard.training.ranks.analysis.launch_errors import number

_SAME = ("MASTER_PORT", "WORLD_SIZE")
"""Variables that all ranks of a job have alike, and another job on this host has not."""


def is_meeting() -> bool:
    """Say whether the main thread of this process is in `init_process_group`."""
    return _init_method() is not None


def _init_method() -> str | None:
    """Return how the main thread's `init_process_group` meets the others: "" by variables, None if it is not in it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        code = frame.f_code
        if code.co_name == CALL and code.co_filename.endswith("distributed_c10d.py"):
            given = frame.f_locals
            method = given.get("init_method")
            return method if type(method) is str else "store:" if given.get("store") is not None else ""
        frame = frame.f_back
    return None


def meeting_point(variables: Mapping[str, str] = os.environ) -> MeetingPoint | None:
    """Return where `init_process_group` waits; None where no host and port are known."""
    host, port = variables.get("MASTER_ADDR"), number(variables.get("MASTER_PORT"))
    method = _init_method() or "env://"
    if method.startswith("tcp://"):
        with suppress(ValueError):
            parts = urlsplit(method)
            host, port = parts.hostname, parts.port
    elif not method.startswith("env://"):
        return None
    if host is None or port is None:
        return None
    is_here = is_this_host(addresses_of(host))
    return MeetingPoint(
        host=host,
        port=port,
        is_here=is_here,
        listener=listener_at(port, variables) if is_here else None,
        has_agent=has_agent(variables) and method.startswith("env://"),
    )


def has_agent(variables: Mapping[str, str]) -> bool:
    """Say whether torchrun listens for the job, so that no rank does."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"


def addresses_of(host: str | None) -> tuple[str, ...]:
    """Return the addresses that a name stands for; none where it is unknown."""
    if not host:
        return ()
    try:
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError):
        return ()


def is_this_host(addresses: tuple[str, ...]) -> bool:
    """Say whether an address among these is this host's."""
    own = {"127.0.0.1", "::1"}
    with suppress(psutil.Error, OSError):
        own |= {each.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for each in all_}
    return any(address.partition("%")[0] in own or address.startswith("127.") for address in addresses)


def listener_at(port: int, variables: Mapping[str, str] = os.environ) -> PortOwner | None:
    """Return the process that listens at a port of this host, or None without one or if unknown."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return PortOwner(connection.pid, _command(connection.pid), _is_job(connection.pid, variables))
    return None


def _command(pid: int | None) -> str:
    with suppress(psutil.Error, OSError):
        return clean(" ".join(psutil.Process(pid).cmdline()[:4]), 80) if pid is not None else ""
    return ""


def _is_job(pid: int | None, variables: Mapping[str, str]) -> bool | None:
    """Say whether a process is of this job: this one, a launcher above it, or a rank; None where the system does not say.

    A rank has the job's variables in its environment. One that was forked, as `notebook_launcher` does, has them not where
    the system shows them: it has the parent and the command of this one.
    """
    if pid is None:
        return None
    with suppress(psutil.Error, OSError):
        own, other = psutil.Process(), psutil.Process(pid)
        if pid in {own.pid, *(parent.pid for parent in own.parents())}:
            return True
        if other.ppid() == own.ppid() and other.cmdline() == own.cmdline():
            return True
        theirs = other.environ()
        return "RANK" in theirs and all(theirs.get(name) == variables.get(name) for name in _SAME)
    return None
