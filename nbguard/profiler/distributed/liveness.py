"""Signs of life of the ranks on one host: each writes a few bytes of a mapped file, which others may read at any time."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from nbguard.profiler.analysis.distributed.ranks import Pulse
from nbguard.profiler.analysis.time import phases
from nbguard.ranks.job_folder import OWNER, owner, owner_of
from nbguard.scan.devices.processes import is_alive

_FIT = struct.Struct("<q")  # number of the fit, behind the file's owner
_BEAT = struct.Struct("<qqq")  # state: batch, code of a phase, nanoseconds of time.monotonic_ns
_HEAD = OWNER.size + _FIT.size
_NO_PHASE = -1


class RankLiveness:
    """The sign of life of this process, in a file that goes with `close`."""

    def __init__(self, folder: Path, rank: int, fit: int) -> None:
        head = owner() + _FIT.pack(fit)
        self._path = _path(folder, rank)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(head + _BEAT.pack(0, _NO_PHASE, time.monotonic_ns()))
        fresh.replace(self._path)  # whole from the start, whoever reads it
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def beat(self, batch: int, code: int = _NO_PHASE) -> None:
        """Say that a phase of a batch has just ended; without a code: that the batch is about to be asked for."""
        _BEAT.pack_into(self._map, _HEAD, batch, code, time.monotonic_ns())

    def close(self) -> None:
        """Take the file away."""
        self._map.close()
        self._path.unlink(missing_ok=True)


def pulse_of(folder: Path, rank: int, fit: int) -> Pulse | None:
    """Return the last sign of life of a rank in this fit; None if it has no file here: not begun, ended, or on another host."""
    try:
        data = _path(folder, rank).read_bytes()
        (number,) = _FIT.unpack_from(data, OWNER.size)
        batch, code, at = _BEAT.unpack_from(data, _HEAD)
    except (OSError, struct.error):
        return None
    process = owner_of(data)
    if process is None or number != fit:
        return None
    phase = phases.ALL[code] if 0 <= code < len(phases.ALL) else ""
    return Pulse(rank=rank, pid=process.pid, batch=batch, phase=phase, age=time.monotonic_ns() - at, is_alive=is_alive(process))


def forget(folder: Path, ranks: Iterable[int]) -> None:
    """Take away the signs of life of ranks that died or hang: nobody looks for them any more."""
    for rank in ranks:
        _path(folder, rank).unlink(missing_ok=True)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.beat"
