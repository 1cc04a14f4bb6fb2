"""Signs of life of the ranks on one host: each writes a few bytes of its mapped file, which others may read at any time."""

from __future__ import annotations

import time

from nbguard.profiler.analysis.distributed.ranks import Pulse
from nbguard.profiler.analysis.time import phases
from nbguard.ranks.job_board import JobBoard

_NO_PHASE = -1
_NO_FIT = 0


class RankLiveness:
    """The sign of life of this process in a fit, from its making to `close`."""

    def __init__(self, board: JobBoard, fit: int) -> None:
        self._file = board.own
        self._fit = fit
        self.beat(0)

    def beat(self, batch: int, code: int = _NO_PHASE) -> None:
        """Say that a phase of a batch has just ended; without a code: that the batch is about to be asked for."""
        self._file.write_pulse(self._fit, batch, code, time.monotonic_ns())

    def close(self) -> None:
        """Show no sign of life any more: this rank's fit has ended."""
        self._file.write_pulse(_NO_FIT, 0, _NO_PHASE, 0)


def pulse_of(board: JobBoard, rank: int, fit: int) -> Pulse | None:
    """Return the last sign of life of a rank in this fit; None if it has none here: not begun, ended, or on another host."""
    file = board.file(rank)
    if file is None:
        return None
    number, batch, code, at = file.read_pulse()
    if number != fit:
        return None
    phase = phases.ALL[code] if 0 <= code < len(phases.ALL) else ""
    age = time.monotonic_ns() - at
    return Pulse(rank=rank, pid=file.process.pid, batch=batch, phase=phase, age=age, is_alive=file.is_alive)
