"""The meeting place of this job's ranks, read from the variables and from the listeners; nothing is connected to."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from nbguard.files import Folder
from nbguard.memory.core.processes import Process
from nbguard.memory.scan.devices.processes import is_alive, process_of
from nbguard.render.words import clean
from nbguard.training.ranks.analysis.flight_dump import CALL, MeetingPoint, PortOwner
from nbguard.training.ranks.analysis.launch_errors import number

# --- The folder that the ranks of one job share on one host, private, found by all of them alone, and gone after the last.


OWNER = struct.Struct("<8sqd")
"""The beginning of each mapped file in the folder: a mark, the pid of its writer, and when that was started."""
_MARK = b"nbguard1"
_NAME = "nbguard-ranks"
SUFFIXES = RANK, FRESH = (".rank", ".new")
"""Of a rank's file, and while it is being made. Nothing else is ever removed from a folder."""


def owner() -> bytes:
    """Return the beginning of a file that this process writes."""
    process = process_of(os.getpid())
    return OWNER.pack(_MARK, os.getpid(), process.started if process else 0.0)


def owner_of(data: bytes) -> Process | None:
    """Return the process that has written a file; None if it does not say."""
    try:
        mark, pid, started = OWNER.unpack_from(data)
    except struct.error:
        return None
    return Process(pid, started) if mark == _MARK else None


def job_folder() -> Path:
    """Return the folder of this job on this host, made if need be and nobody else's to look into.

    It lies in the user's runtime folder where there is one. Launchers drop `XDG_RUNTIME_DIR` for some ranks, so a link in the
    folder for temporary files leads there; a rank that came first without it has made the folder there itself.

    Raises:
        OSError: it cannot be made, or somebody else has made it.
    """
    name = f"{_prefix()}{_job()}"
    folder = meeting = Path(tempfile.gettempdir()) / name
    runtime = _runtime_folder()
    if runtime is not None:
        with suppress(OSError):
            meeting.symlink_to(runtime / name)
        folder = runtime / name
    with suppress(FileNotFoundError):
        status = meeting.lstat()
        if _is_own(status):
            target = meeting.readlink() if stat.S_ISLNK(status.st_mode) else meeting
            folder = target if target.name == name else meeting  # a link that was made here leads to a folder of that name
    folder.mkdir(mode=0o700, exist_ok=True)
    opened(folder).close()
    return folder


def opened(folder: Path) -> Folder:
    """Return the folder of a job, held open.

    Raises:
        OSError: it is gone, or it is not this user's own and private.
    """
    held = Folder(folder)
    if not held.is_private():
        held.close()
        raise PermissionError(f"{folder} is not this user's own")
    return held


def leave(folder: Path) -> None:
    """Remove the folder if nothing is left in it, and the leftovers of this user's killed jobs."""
    with suppress(OSError):
        folder.rmdir()
    for place in dict.fromkeys((folder.parent, Path(tempfile.gettempdir()))):  # the links come after their targets
        with suppress(OSError), Folder(place) as held:
            for name in held.names():
                if name.startswith(_prefix()):
                    with suppress(OSError):
                        _sweep(held, name, is_own=name == folder.name)


def _sweep(place: Folder, name: str, is_own: bool) -> None:
    """Remove the leftovers of a job: a link to its folder, once that is gone, or the folder with files of dead ranks."""
    status = place.status_of(name)
    if status is None or not _is_own(status):
        return
    if stat.S_ISLNK(status.st_mode):
        if not (place.path / name).exists() and (is_own or _is_old(status)):
            place.remove(name)
    elif stat.S_ISDIR(status.st_mode) and not is_own:
        with place.folder(name) as folder:
            files = folder.names()
            if not folder.is_private() or not (all(_is_left(folder, file) for file in files) if files else _is_old(status)):
                return
            for file in files:
                folder.remove(file)
        place.remove_folder(name)


def _is_left(folder: Folder, name: str) -> bool:
    """Say whether a file is a rank's whose process died."""
    if not name.endswith(SUFFIXES):
        return False
    with os.fdopen(folder.open(name), "rb") as file:
        process = owner_of(file.read(OWNER.size))
        return process is not None and _is_old(os.fstat(file.fileno())) and not is_alive(process)


def _is_old(status: os.stat_result) -> bool:
    """Say whether a file is not so fresh that its job may just have made it."""
    return time.time() - status.st_mtime >= 60


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _runtime_folder() -> Path | None:
    """Return the user's runtime folder; None where there is none that is this user's own and private."""
    path = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if path.is_absolute():
        with suppress(OSError), Folder(path) as folder:
            return path if folder.is_private() else None
    return None


def _prefix() -> str:
    return f"{_NAME}-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def _job() -> str:
    """Return a name that all ranks of the job on this host share, and no other job."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    key = [os.environ.get(name, "") for name in names]
    if not os.environ.get("MASTER_PORT"):
        key.append(str(os.getppid()))
    return hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]


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
