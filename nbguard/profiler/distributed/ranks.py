"""The ranks of a distributed fit: each shows signs of life and tells at its end how it went; rank 0 gathers."""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nbguard.profiler.analysis.distributed.ranks import Pulse, RankMessage, from_text, rank_report, to_text
from nbguard.profiler.analysis.report import RankReport, RankRow
from nbguard.profiler.distributed.exchange import RankExchange
from nbguard.profiler.distributed.liveness import RankLiveness, forget, job_folder, leave, pulse_of
from nbguard.profiler.distributed.rank import Rank, current_rank, environment
from nbguard.profiler.distributed.watchdog import RankWatchdog
from nbguard.profiler.record.recorder import Recorder

_EVERY = 0.02  # seconds between two looks for what others have told
_GRACE = 1.0  # seconds for what a rank has told to arrive, once it is gone
_TO_SEND = 2.0  # seconds that a rank tries to tell

_fits = itertools.count(1)


class RankWatch:
    """Watches a fit of several ranks. In a program that is none of them it does nothing.

    `limit`: seconds that rank 0 waits for the others after its own end. `patience`: seconds without progress of any rank
    after which rank 0 says so in the log of a program; in a notebook nothing is said but the report.
    """

    def __init__(self, limit: float = 10.0, patience: float = 60.0) -> None:
        self._limit = limit
        self._patience = patience
        self._place: Rank | None = None
        self._fit = 0
        self._folder: Path | None = None
        self._heart: RankLiveness | None = None
        self._vigil: RankWatchdog | None = None
        self._recorder: Recorder | None = None
        self._batch = 0

    @property
    def speaks(self) -> bool:
        """Say whether this process shows and writes the report: it is rank 0, or the only one."""
        return self._place is None or self._place.rank == 0

    def start(self, recorder: Recorder) -> None:
        """Show signs of life from the first batch on, if this is a rank by then: a process group may be made in the cell."""
        self._recorder = recorder
        recorder.subscribe("loader", self._loads)

    def stop(self) -> None:
        """Let go of the log. The signs of life and the vigil stay until `gather`: others may still be at work."""
        self._recorder = None
        if self._vigil is not None:
            self._vigil.fit_has_ended()

    def gather(self, row: RankRow) -> RankReport | None:
        """Tell rank 0 how this rank's fit went; return its report on all ranks, on rank 0, else None.

        Which rank, host and process it was is filled in. Called once, however the fit has ended; waits no longer than
        `limit`. An interrupt ends the waiting, not the report.
        """
        self._find_place()
        if self._place is None:
            return None
        row = replace(row, rank=self._place.rank, host=socket.gethostname(), pid=os.getpid())
        told = RankMessage(row, tuple(environment()))
        try:
            if self.speaks:
                return self._report(self._place, told)
            self._send(self._place, told)
            return None
        finally:
            self._leave(self._place)

    def _loads(self, _iterator: object) -> None:
        self._find_place()

    def _begins(self, batch: int) -> None:
        self._batch = batch
        if self._heart is not None:
            self._heart.beat(batch)

    def _ended(self, code: int) -> None:
        if self._heart is not None:
            self._heart.beat(self._batch, code)

    def _find_place(self) -> None:
        """Find out which rank this is, once it is one, and begin to show signs of life."""
        if self._place is not None:
            return
        self._place = current_rank()
        if self._place is None:
            return
        self._fit = next(_fits)
        with suppress(OSError):  # without a folder there is the store
            self._folder = job_folder()
            self._heart = RankLiveness(self._folder, self._place.rank, self._fit)
            if self._recorder is not None:
                self._recorder.subscribe("batch", self._begins, each=True)
                self._recorder.subscribe("phase", self._ended, each=True)
                self._keep_vigil(self._place)

    def _keep_vigil(self, at: Rank) -> None:
        """Have rank 0 of a program watch over all ranks of its host."""
        if at.rank == 0 and "ipykernel" not in sys.modules and hasattr(select, "poll"):
            self._vigil = RankWatchdog(lambda: self._pulses(range(at.world), {}), self._patience)

    def _pulse(self, rank: int) -> Pulse | None:
        return None if self._folder is None else pulse_of(self._folder, rank, self._fit)

    def _send(self, at: Rank, told: RankMessage) -> None:
        first = self._pulse(0)
        is_listening = first is not None and first.is_alive
        if is_listening or self._folder is None or not at.is_all_here:
            RankExchange(self._folder, self._fit).send(at.rank, to_text(told), _TO_SEND, is_read_here=is_listening)

    def _report(self, at: Rank, told: RankMessage) -> RankReport:
        mail, others = RankExchange(self._folder, self._fit), range(1, at.world)
        letters: dict[int, str] = {}
        mail.listen(others)
        start = time.monotonic()
        with suppress(KeyboardInterrupt):
            while True:
                pulses = self._pulses(others, letters)  # before the letters: a sign of life goes once its rank has told
                letters |= mail.read([rank for rank in others if rank not in letters])
                waited = time.monotonic() - start
                if len(letters) == len(others) or waited > self._limit:
                    break
                if not self._may_come(at, pulses, letters, waited):
                    break
                time.sleep(_EVERY)
        mail.close(others)
        heard = [found for text in letters.values() if (found := from_text(text))]
        pulses, waited = self._pulses(others, letters), time.monotonic() - start
        return rank_report(at.world, [told, *heard], pulses, round(1e9 * waited), told.row.host)

    def _pulses(self, others: range, letters: dict[int, str]) -> dict[int, Pulse]:
        """Return the signs of life of the ranks that have not told yet."""
        return {rank: pulse for rank in others if rank not in letters and (pulse := self._pulse(rank))}

    def _may_come(self, at: Rank, pulses: dict[int, Pulse], letters: dict[int, str], waited: float) -> bool:
        """Say whether it is worth waiting: somebody is alive, or has left no sign and may be on another host."""
        if any(pulse.is_alive for pulse in pulses.values()):
            return True
        is_unseen = len(letters) + len(pulses) < at.world - 1
        return is_unseen and (waited < _GRACE or self._folder is None or not at.is_all_here)

    def _leave(self, at: Rank) -> None:
        if self._vigil is not None:
            self._vigil.stop()
        with suppress(OSError):
            if self._heart is not None:
                self._heart.close()
            if self._folder is not None:
                if at.rank == 0:
                    forget(self._folder, self._pulses(range(at.world), {}))
                leave(self._folder)
        self._vigil = self._heart = None
