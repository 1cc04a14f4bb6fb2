"""The folder that the ranks of one job share on one host, private, found by all of them alone, and gone after the last."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from nbguard.files import Folder
from nbguard.memory.core.processes import Process
from nbguard.memory.scan.devices.processes import is_alive, process_of

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
