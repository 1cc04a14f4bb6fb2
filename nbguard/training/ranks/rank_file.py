"""The file of one rank, mapped by its process and by the other ranks of its host, which outlives its name, and its process.

Once all ranks have mapped it, its name goes: from then on nothing is left behind, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from nbguard.memory.core.processes import Process
from nbguard.memory.scan.devices.processes import is_alive
from nbguard.training.ranks.call_hook import CALLS_SIZE, CallLog
from nbguard.training.ranks.job_folder import FRESH, OWNER, opened, owner, owner_of

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
