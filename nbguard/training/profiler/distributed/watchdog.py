"""A warning in the program's log when another rank dies, or none makes progress, as then a report may never be made.

A launcher ends all ranks within a tenth of a second of the first death, and a collective may wait for the dead one for ever.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress

from nbguard.training.profiler.analysis.distributed.ranks import Pulse, where
from nbguard.units import format_time

_EVERY = 1000  # milliseconds between two looks where nothing happens
_log = logging.getLogger("nbguard")


class RankWatchdog:
    """Watches the ranks of this host in a thread. `pulses` gives their signs of life; `patience` is in seconds."""

    def __init__(self, pulses: Callable[[], Mapping[int, Pulse]], patience: float) -> None:
        self._pulses = pulses
        self._patience: int | None = round(patience * 1e9)
        self._dead: set[int] = set()
        self._is_stuck = False
        self._is_over = False
        self._ends, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="nbguard-watchdog", daemon=True)
        self._thread.start()

    def fit_has_ended(self) -> None:
        """Look for deaths only from here on: this rank itself is at its end and comes no further."""
        self._patience = None

    def stop(self) -> None:
        """End the watch with a last check, as an error of this fit may have come of another rank's death."""
        self._is_over = True
        with suppress(BrokenPipeError):  # it ended by itself
            os.write(self._end, b".")
        self._thread.join(1)
        os.close(self._end)

    def _run(self) -> None:
        with suppress(Exception):  # a mistake of ours is no line in the program's output
            self._watch()
        os.close(self._ends)

    def _watch(self) -> None:
        wakers = select.poll()
        wakers.register(self._ends, select.POLLIN)
        with ExitStack() as processes:
            known: set[int] = set()
            while True:
                pulses = self._pulses()
                self._tell(pulses)
                if self._is_over:
                    return
                for pulse in pulses.values():
                    if pulse.is_alive and pulse.pid not in known:
                        known.add(pulse.pid)
                        _wake_at_end(pulse.pid, wakers, processes)
                for fd, _ in wakers.poll(_EVERY):
                    wakers.unregister(fd)

    def _tell(self, pulses: Mapping[int, Pulse]) -> None:
        for pulse in pulses.values():
            if not pulse.is_alive and pulse.rank not in self._dead:
                self._dead.add(pulse.rank)
                _log.warning("nbguard: rank %d died %s; its process %d is gone", pulse.rank, where(pulse), pulse.pid)
        least = min((pulse.age for pulse in pulses.values()), default=0)
        if self._patience is None or least < self._patience:
            self._is_stuck = False
        elif not self._is_stuck:
            self._is_stuck = True
            places = "; ".join(f"rank {pulse.rank} {where(pulse)}" for pulse in pulses.values())
            _log.warning("nbguard: no rank here made progress for %s: %s", format_time(least), places)


def _wake_at_end(pid: int, wakers: select.poll, until: ExitStack) -> None:
    """Have the end of a process wake the poll, where the system can do that; elsewhere the next poll sees it."""
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # it ended in this moment
            fd = os.pidfd_open(pid)
            until.callback(os.close, fd)
            wakers.register(fd, select.POLLIN)
