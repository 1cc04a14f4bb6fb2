"""The folder that the ranks of one job share on one host: private, found by all of them alone, and gone after the last."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from nbguard.memory.processes import Process
from nbguard.scan.devices.processes import is_alive, process_of

OWNER = struct.Struct("<8sqd")
"""The beginning of each mapped file in the folder: a mark, the pid of its writer, and when that was started."""
_MARK = b"nbguard1"
_NAME = "nbguard-ranks"


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

    Raises:
        OSError: it cannot be made, or somebody else has made it.
    """
    folder = Path(tempfile.gettempdir()) / f"{_prefix()}{_job()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077)):
        raise PermissionError(f"{folder} is not this user's own")
    return folder


def leave(folder: Path) -> None:
    """Remove the folder if nothing is left in it, and what jobs have left behind that were killed."""
    for candidate in (folder, *folder.parent.glob(f"{_prefix()}*")):
        with suppress(OSError):
            files = list(candidate.iterdir())
            if candidate != folder and not any(_is_somebodys(file) for file in files):
                for file in files:
                    file.unlink(missing_ok=True)
            candidate.rmdir()


def _is_somebodys(file: Path) -> bool:
    """Say whether a file is of a process that is alive, or too fresh to tell."""
    if time.time() - file.stat().st_mtime < 60:
        return True
    with file.open("rb") as opened:
        process = owner_of(opened.read(OWNER.size))
    return process is not None and is_alive(process)


def _prefix() -> str:
    return f"{_NAME}-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def _job() -> str:
    """Return a name that all ranks of the job on this host share, and no other job."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    key = [os.environ.get(name, "") for name in names]
    if not os.environ.get("MASTER_PORT"):
        key.append(str(os.getppid()))
    return hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
