"""The file of one rank, mapped by its process and by the other ranks of its host, which outlives its name, and its process.

Once all ranks have mapped it, its name goes: from then on nothing is left behind, however the processes end.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from nbguard.files import Folder
from nbguard.memory.core.processes import Process
from nbguard.memory.scan.devices.processes import is_alive, process_of
from nbguard.training.ranks.call_hook import CALLS_SIZE, CallLog

# --- The folder that the ranks of one job share on one host, private, found by all of them alone, and gone after the last


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


# --- rank file


WatchState: TypeAlias = Literal["running", "ended", "raised"]
TextKind: TypeAlias = Literal["facts", "message"]

_STATES: tuple[WatchState, ...] = ("running", "ended", "raised")
_KINDS: tuple[TextKind, ...] = ("facts", "message")
_HEAD = struct.Struct("<q?d")  # index in _STATES, whether an alarm may come, when the last was raised (epoch)
_PULSE = struct.Struct("<qqqq")
_LENGTH = struct.Struct("<qI")  # of a text in bytes, and its checksum: one that is just being written is none
_TEXT = 1 << 20  # bytes; pages that nobody has written to take no space
_RANKS = 4096  # noted as having mapped the file

_HEAD_AT = OWNER.size
_PULSE_AT = _HEAD_AT + _HEAD.size
_SEEN_AT = _PULSE_AT + _PULSE.size
_CALLS_AT = -(-(_SEEN_AT + _RANKS) // 8) * 8
_TEXT_AT = -(-(_CALLS_AT + CALLS_SIZE) // mmap.PAGESIZE) * mmap.PAGESIZE
_SIZE = _TEXT_AT + len(_KINDS) * _TEXT


class RankFile:
    """The mapped file of a rank: its own process writes to it, the others read."""

    def __init__(self, path: Path) -> None:
        """Map the file at a path.

        Raises:
            OSError: there is none, or it is not a rank's.
        """
        with opened(path.parent) as folder, os.fdopen(folder.open(path.name, os.O_RDWR), "r+b") as file:
            try:
                self._map = mmap.mmap(file.fileno(), _SIZE)
            except ValueError:
                raise OSError(f"{path.name} is shorter than a rank's file") from None
        process = owner_of(self._map[: OWNER.size])
        if process is None:
            self._map.close()
            raise OSError(f"{path.name} does not say whose it is")
        self.path = path
        self.process: Process = process
        self.calls: CallLog = CallLog(self._map, _CALLS_AT)

    @classmethod
    def create(cls, path: Path) -> RankFile:
        """Make the file of this process.

        Raises:
            OSError: it cannot be made.
        """
        fresh = path.with_suffix(FRESH).name
        with opened(path.parent) as folder:
            folder.remove(fresh)  # a rank that was killed left it
            with folder.make(fresh, 0o600) as file:
                file.write(owner())
                file.truncate(_SIZE)
            folder.rename(fresh, path.name)  # whole from the start, whoever reads it
        return cls(path)

    @property
    def is_alive(self) -> bool:
        """Say whether the rank's process goes on."""
        return is_alive(self.process)

    @property
    def state(self) -> WatchState:
        """Return how far the rank's watch is."""
        index = _HEAD.unpack_from(self._map, _HEAD_AT)[0]
        return _STATES[index] if 0 <= index < len(_STATES) else "ended"

    def note_state(self, state: WatchState) -> None:
        """Note how far the watch is. The file stays: others may still look for this rank's calls."""
        _HEAD.pack_into(self._map, _HEAD_AT, _STATES.index(state), *self._alarms())

    @property
    def alarm(self) -> float:
        """Return when the rank raised its last alarm, in seconds since the epoch, or 0 without any."""
        return self._alarms()[1]

    def raise_alarm(self, at: float) -> None:
        """Note an alarm."""
        _HEAD.pack_into(self._map, _HEAD_AT, _STATES.index(self.state), True, at)

    @property
    def is_alarm_near(self) -> bool:
        """Say whether the rank expects an alarm."""
        return self._alarms()[0]

    def warn(self) -> None:
        """Note that an alarm may come."""
        _HEAD.pack_into(self._map, _HEAD_AT, _STATES.index(self.state), True, self.alarm)

    def _alarms(self) -> tuple[bool, float]:
        _, is_near, at = _HEAD.unpack_from(self._map, _HEAD_AT)
        return is_near, at

    def write_pulse(self, fit: int, batch: int, code: int, at: int) -> None:
        """Note a sign of life: number of the fit, batch, code of a phase, nanoseconds of time.monotonic_ns."""
        # In one piece: `pack_into` writes zeros first, which another rank may read.
        self._map[_PULSE_AT : _PULSE_AT + _PULSE.size] = _PULSE.pack(fit, batch, code, at)

    def read_pulse(self) -> tuple[int, int, int, int]:
        """Return the last sign of life, as it was written; zeros: there has been none."""
        return _PULSE.unpack_from(self._map, _PULSE_AT)

    @property
    def is_in_fit(self) -> bool:
        """Say whether a profiled fit of the rank goes on, including its exchange with the other ranks."""
        return self.read_pulse()[0] != 0

    def write(self, kind: TextKind, text: str) -> None:
        """Let the other ranks read a text; one that is too long is none."""
        data = text.encode()
        start = self._text_at(kind)
        if len(data) <= _TEXT - _LENGTH.size:
            self._map[start + _LENGTH.size : start + _LENGTH.size + len(data)] = data
            _LENGTH.pack_into(self._map, start, len(data), zlib.crc32(data))

    def read(self, kind: TextKind) -> str | None:
        """Return a text of the rank, or None without one or while it is being written."""
        start = self._text_at(kind)
        length, checksum = _LENGTH.unpack_from(self._map, start)
        if not 0 < length <= _TEXT - _LENGTH.size:
            return None
        data = self._map[start + _LENGTH.size : start + _LENGTH.size + length]
        return data.decode("utf-8", "replace") if zlib.crc32(data) == checksum else None

    def seen_by(self, rank: int) -> None:
        """Note that a rank has mapped the file."""
        if rank < _RANKS:
            self._map[_SEEN_AT + rank] = 1

    def readers(self) -> int:
        """Return how many ranks have mapped the file, its own among them."""
        return sum(self._map[_SEEN_AT : _SEEN_AT + _RANKS])

    def unlink(self) -> None:
        """Take the name away."""
        with suppress(OSError), opened(self.path.parent) as folder:
            folder.remove(self.path.name)

    def close(self) -> None:
        """Let go of the file."""
        self.calls.close()
        self._map.close()

    def _text_at(self, kind: TextKind) -> int:
        return _TEXT_AT + _KINDS.index(kind) * _TEXT
