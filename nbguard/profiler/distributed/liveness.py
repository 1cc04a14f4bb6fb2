"""Signs of life of the ranks on one host: each writes a few bytes of a mapped file, which others may read at any time."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nbguard.memory.processes import Process
from nbguard.profiler.analysis.distributed.ranks import Pulse
from nbguard.profiler.analysis.time import phases
from nbguard.scan.devices.processes import is_alive, process_of

_HEAD = struct.Struct("<8sqdq")  # process: magic, pid, when the process started, number of the fit
_BEAT = struct.Struct("<qqq")  # state: batch, code of a phase, nanoseconds of time.monotonic_ns
_MAGIC = b"nbguard1"
_NO_PHASE = -1
_NAME = "nbguard-ranks"


class RankLiveness:
    """The sign of life of this process, in a file that goes with `close`."""

    def __init__(self, folder: Path, rank: int, fit: int) -> None:
        process = process_of(os.getpid())
        head = _HEAD.pack(_MAGIC, os.getpid(), process.started if process else 0.0, fit)
        self._path = _path(folder, rank)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(head + _BEAT.pack(0, _NO_PHASE, time.monotonic_ns()))
        fresh.replace(self._path)  # whole from the start, whoever reads it
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def beat(self, batch: int, code: int = _NO_PHASE) -> None:
        """Say that a phase of a batch has just ended; without a code: that the batch is about to be asked for."""
        _BEAT.pack_into(self._map, _HEAD.size, batch, code, time.monotonic_ns())

    def close(self) -> None:
        """Take the file away."""
        self._map.close()
        self._path.unlink(missing_ok=True)


def pulse_of(folder: Path, rank: int, fit: int) -> Pulse | None:
    """Return the last sign of life of a rank in this fit; None if it has no file here: not begun, ended, or on another host."""
    try:
        data = _path(folder, rank).read_bytes()
        magic, pid, started, number = _HEAD.unpack_from(data)
        batch, code, at = _BEAT.unpack_from(data, _HEAD.size)
    except (OSError, struct.error):
        return None
    if magic != _MAGIC or number != fit:
        return None
    phase = phases.ALL[code] if 0 <= code < len(phases.ALL) else ""
    return Pulse(
        rank=rank, pid=pid, batch=batch, phase=phase, age=time.monotonic_ns() - at, is_alive=is_alive(Process(pid, started))
    )


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


def forget(folder: Path, ranks: Iterable[int]) -> None:
    """Take away the signs of life of ranks that died or hang: nobody looks for them any more."""
    for rank in ranks:
        _path(folder, rank).unlink(missing_ok=True)


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
    """Say whether a file is the heartbeat of a process that is alive, or too fresh to tell."""
    if time.time() - file.stat().st_mtime < 60:
        return True
    data = file.read_bytes()
    if not data.startswith(_MAGIC):
        return False
    _, pid, started, _ = _HEAD.unpack_from(data)
    return is_alive(Process(pid, started))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.beat"


def _prefix() -> str:
    return f"{_NAME}-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def _job() -> str:
    """Return a name that all ranks of the job on this host share, and no other job."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    key = [os.environ.get(name, "") for name in names]
    if not os.environ.get("MASTER_PORT"):
        key.append(str(os.getppid()))
    return hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
