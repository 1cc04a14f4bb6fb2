"""The ranks of a distributed fit, with signs of life, a warning when one dies, and figures that rank 0 collects at the end."""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbguard.plain_data import to_plain
from nbguard.training.profiler.analysis.ranks import (
    GradientSums,
    Pulse,
    RankMessage,
    RankObservations,
    ShardCalls,
    message_of,
    shard_calls,
    where,
)
from nbguard.training.profiler.analysis.report import RankRow
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.ranks.analysis.facts import RankFault
from nbguard.training.ranks.rank import Rank, current_rank, print_once
from nbguard.training.ranks.watch import watch_ranks
from nbguard.units import format_time

if TYPE_CHECKING:
    from nbguard.training.profiler.instruments.agreement import RankDigester
    from nbguard.training.ranks.job_board import JobBoard

# --- Messages of ranks to rank 0 at their end, through the store of the process group, and on one host through their files,
# too.
#
# Never a collective: a rank that hangs in one takes nobody else with it. The store is spoken to in a thread of its own,
# since
# it answers no more once its host is gone.


_SECONDS_BETWEEN_READS = 0.05  # seconds between two looks into the store


class RankExchange:
    """Carries texts from ranks to rank 0, for one fit. All ranks number their fits alike."""

    def __init__(self, board: JobBoard | None, fit: int) -> None:
        self._board = board
        self._fit = fit
        self._inbox: dict[int, str] = {}
        self._is_over = threading.Event()

    def send(self, rank: int, text: str, limit: float, *, is_read_here: bool) -> None:
        """Leave the text of a rank in the store, for up to `limit` seconds, and if rank 0 reads it there in the rank's file."""
        if self._board is not None and is_read_here:
            self._board.own.write("message", f"{self._fit} {text}")
        _aside(lambda: self._put(rank, text)).join(limit)

    def listen(self, ranks: Collection[int]) -> None:
        """Begin to look for messages of these ranks in the store."""
        _aside(lambda: self._look(set(ranks)))

    def read(self, ranks: Collection[int]) -> dict[int, str]:
        """Return the messages of these ranks so far."""
        texts = {rank: self._inbox[rank] for rank in ranks if rank in self._inbox}
        for rank in ranks:
            if rank not in texts and (text := self._from_file(rank)) is not None:
                texts[rank] = text
        return texts

    def close(self) -> None:
        """Stop looking."""
        self._is_over.set()

    def _from_file(self, rank: int) -> str | None:
        """Return the message that a rank of this host left for this fit."""
        file = None if self._board is None else self._board.file(rank)
        fit, _, text = ((file and file.read("message")) or "").partition(" ")
        return text if fit == str(self._fit) else None

    def _put(self, rank: int, text: str) -> None:
        store = self._store()
        if store is not None:
            store.set(str(rank), text)

    def _look(self, missing: set[int]) -> None:
        store = self._store()
        while store is not None and missing and not self._is_over.is_set():
            for rank in list(missing):
                if store.check([str(rank)]):
                    self._inbox[rank] = store.get(str(rank)).decode()
                    store.delete_key(str(rank))
                    missing.discard(rank)
            self._is_over.wait(_SECONDS_BETWEEN_READS)

    def _store(self) -> Any:
        """Return the store of the process group, for this fit's keys only; None without a group."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        from torch.distributed import PrefixStore, distributed_c10d

        return PrefixStore(f"nbguard/{self._fit}", distributed_c10d._get_default_store())


def _aside(act: Callable[[], None]) -> threading.Thread:
    """Start a thread that does something and says nothing if it fails: then there is the folder, or a rank not heard of."""

    def quietly() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=quietly, name="nbguard-ranks", daemon=True)
    thread.start()
    return thread


# --- A warning in the program's log when another rank dies, or none makes progress, as then a report may never be made.
#
# A launcher ends all ranks within a tenth of a second of the first death, and a collective may wait for the dead one for
# ever.


_MILLISECONDS_BETWEEN_POLLS = 1000  # milliseconds between two looks where nothing happens
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
                for fd, _ in wakers.poll(_MILLISECONDS_BETWEEN_POLLS):
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


_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
"""Classes of models whose parameters are shards."""
_NO_PHASE = -1
_NO_FIT = 0


def _sums_of(figures: dict[str, Any]) -> GradientSums | None:
    """Return the sums of gradients, from the log of DistributedDataParallel; None where it has timed none."""
    taken = figures.get("avg_backward_comm_time", 0)
    sizes = str(figures.get("rebuilt_bucket_sizes") or figures.get("bucket_sizes") or "")
    buckets = [int(size) for size in sizes.split(",") if size.strip().isdigit()]
    if taken <= 0 or not buckets:
        return None
    overlap = min(max(figures.get("avg_backward_compute_comm_overlap_time", 0), 0), taken)
    return GradientSums(
        nbytes=sum(buckets), calls=len(buckets), backend=str(figures.get("backend_name", "")), time=taken, overlap=overlap
    )


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
        """Show no sign of life any more: this rank's fit ended."""
        self._file.write_pulse(_NO_FIT, 0, _NO_PHASE, 0)


def pulse_of(board: JobBoard, rank: int, fit: int) -> Pulse | None:
    """Return the last sign of life of a rank in this fit; None if it has none here: not begun, ended, or on another host."""
    file = board.file(rank)
    if file is None:
        return None
    number, batch, code, at = file.read_pulse()
    if number != fit:
        return None
    phase = phase_log.ALL[code] if 0 <= code < len(phase_log.ALL) else ""
    age = time.monotonic_ns() - at
    return Pulse(rank=rank, pid=file.process.pid, batch=batch, phase=phase, age=age, is_alive=file.is_alive)


_EVERY = 0.02  # seconds between two looks for messages
_GRACE = 1.0  # seconds for the message of a rank to arrive, once that is gone
_TO_SEND = 2.0  # seconds that a rank tries to send its message

_TOLD = ("died", "raised")
"""Kinds of faults that a rank's row and finding tell by themselves."""

_fits = itertools.count(1)


class RankWatch:
    """Watches a fit of several ranks. In a program that is none of them it does nothing.

    `limit`: seconds that rank 0 waits for the others after its own end. `patience`: seconds without progress of any rank until
    rank 0 says so in the log of a program; if a collective waits, each rank names the cause. `check_ranks`: at each so-many-th
    step of an optimizer the ranks' models are digested, to be compared in the report; never if 0.
    """

    watches = "other ranks"

    def __init__(self, limit: float = 10.0, patience: float = 60.0, check_ranks: int = 0) -> None:
        self._limit = limit
        self._patience = patience
        self._rank: Rank | None = None
        self._fit = 0
        self._board: JobBoard | None = None
        self._liveness: RankLiveness | None = None
        self._watchdog: RankWatchdog | None = None
        self._hangs = watch_ranks(patience)
        self._digester = _digester(check_ranks) if check_ranks else None
        self._recorder: Recorder | None = None
        self._batch = 0
        self._observed: RankObservations | None = None
        self._model: weakref.ref[Any] | None = None  # under DistributedDataParallel
        self._device = ""  # of a model under FSDP: its type
        self._sums: GradientSums | None = None
        self._noted: tuple[int, dict[int, int]] = 0, {}  # batch that began last, and how often each call was noted before
        self._shards: tuple[ShardCalls, ...] = ()

    @property
    def speaks(self) -> bool:
        """Say whether this process shows and writes the report: it is rank 0, or the only one."""
        return self._rank is None or self._rank.rank == 0

    def start(self, recorder: Recorder) -> None:
        """Show signs of life from the first batch on, if this is a rank by then: a process group may be made in the cell."""
        self._recorder = recorder
        recorder.subscribe("loader", self._loads)
        recorder.subscribe("model", self._calls)

    def ended(self, error: BaseException | None) -> None:
        """Say how the fit ended on this rank, before anything else: others may wait for it in vain."""
        self._hangs.stop(error)
        self._sum_up()

    def stop(self) -> None:
        """Let go of the log. The signs of life and the watchdog stay until `exchange`: others may still be at work."""
        self._recorder = None
        if self._watchdog is not None:
            self._watchdog.fit_has_ended()

    def exchange(self, row: RankRow) -> RankObservations | None:
        """Send the row of this rank to rank 0; on rank 0 collect the rows of all ranks and return them, else None.

        The numbers of rank and process and the name of the host are filled in. Called once, however the fit ended; waits
        no longer than `limit`. An interrupt ends the waiting, not the report.
        """
        self._find_rank()
        if self._rank is None:
            return None
        from nbguard.training.profiler.instruments.agreement import environment

        row = replace(row, rank=self._rank.rank, host=socket.gethostname(), pid=os.getpid())
        digests = None if self._digester is None else self._digester.observe()
        message = RankMessage(row, tuple(environment()), digests)
        try:
            if self.speaks:
                self._observed = self._collect(self._rank, message)
            else:
                self._send(self._rank, message)
        finally:
            self._leave()
        return self._observed

    def observe(self) -> RankObservations | None:
        """Return the messages of the exchange; None before it, on other ranks, and in a program of one process."""
        return self._observed

    def _loads(self, iterator: object) -> None:
        self._find_rank()
        if self._rank is not None and self._digester is not None:
            self._digester.loads(iterator)

    def _calls(self, module: Any, _: object) -> None:
        if self._model is None and type(module).__name__ == "DistributedDataParallel":
            self._model = weakref.ref(module)
            if self._recorder is not None:
                self._recorder.subscribe("batch", self._sum_up)  # in those that are looked at: the model may be gone at the end
        elif not self._device and any(kind.__name__ in _SHARDED for kind in type(module).__mro__):
            parameter = next(module.parameters(), None)
            self._device = "cuda" if parameter is None else parameter.device.type
            if self._recorder is not None:
                self._recorder.subscribe("batch", self._note_shards)

    def _sum_up(self, *_: object) -> None:
        model = None if self._model is None else self._model()
        if model is not None:
            self._sums = _sums_of(model._get_ddp_logging_data()) or self._sums

    def _note_shards(self, batch: int) -> None:
        """Keep the collectives of the batch that ends; those of a validation batch are fewer."""
        if self._board is None:
            return
        log, (number, before) = self._board.own.calls, self._noted
        self._noted = batch, dict(log.times)
        if number and batch == number + 1:
            from nbguard.training.ranks.flight_recorder import group_ranks

            calls = shard_calls(log.since(before), dict(group_ranks()), self._device)
            self._shards = max(self._shards, calls, key=lambda shards: sum(each.nbytes for each in shards))

    def _begins(self, batch: int) -> None:
        self._batch = batch
        if self._liveness is not None:
            self._liveness.beat(batch)

    def _ended(self, code: int) -> None:
        if self._liveness is not None:
            self._liveness.beat(self._batch, code)

    def _find_rank(self) -> None:
        """Find out which rank this is, once it is one, and begin to show signs of life."""
        if self._rank is not None:
            return
        self._rank = current_rank()
        if self._rank is None:
            return
        from nbguard.training.ranks.job_board import open_board

        if self._recorder is not None:
            print_once(self._rank)
        self._fit = next(_fits)
        with suppress(OSError):  # without the files there is the store
            self._board = open_board(self._rank)
            self._liveness = RankLiveness(self._board, self._fit)
            if self._recorder is not None:
                self._hangs.start()
                if self._digester is not None:
                    self._digester.start(self._recorder)
                self._recorder.subscribe("batch", self._begins, every_batch=True)
                self._recorder.subscribe("phase", self._ended, every_batch=True)
                self._start_watchdog(self._rank)

    def _start_watchdog(self, at: Rank) -> None:
        """Have rank 0 of a program watch over all ranks of its host."""
        if at.rank == 0 and "ipykernel" not in sys.modules and hasattr(select, "poll"):
            self._watchdog = RankWatchdog(lambda: self._pulses(range(at.world), {}), self._patience)

    def _pulse(self, rank: int) -> Pulse | None:
        return None if self._board is None else pulse_of(self._board, rank, self._fit)

    def _send(self, at: Rank, message: RankMessage) -> None:
        first = self._pulse(0)
        is_listening = first is not None and first.is_alive
        if is_listening or self._board is None or not at.is_all_here:
            RankExchange(self._board, self._fit).send(
                at.rank, json.dumps(to_plain(message)), _TO_SEND, is_read_here=is_listening
            )

    def _collect(self, at: Rank, own: RankMessage) -> RankObservations:
        """Wait for the messages of the other ranks, as long as any may still come."""
        from nbguard.training.ranks.analysis.launch_errors import launch_of

        exchange, others = RankExchange(self._board, self._fit), range(1, at.world)
        texts: dict[int, str] = {}
        exchange.listen(others)
        start = time.monotonic()
        with suppress(KeyboardInterrupt):
            while True:
                pulses = self._pulses(others, texts)  # before the messages: a sign of life goes once its rank has sent one
                texts |= exchange.read([rank for rank in others if rank not in texts])
                waited = time.monotonic() - start
                if len(texts) == len(others) or waited > self._limit:
                    break
                if not self._may_come(at, pulses, texts, waited):
                    break
                time.sleep(_EVERY)
        exchange.close()
        pulses, waited = self._pulses(others, texts), time.monotonic() - start
        return RankObservations(
            world=at.world,
            host=own.row.host,
            messages=(own, *(message for text in texts.values() if (message := message_of(text)))),
            pulses=tuple(pulses.values()),
            waited=round(1e9 * waited),
            launch=replace(launch_of(os.environ), rank=at.rank, world=at.world).words,
            sums=self._sums,
            shards=self._shards,
            hang=None if own.row.state == "complete" else self._hang(),
        )

    def _hang(self) -> RankFault | None:
        """Return the cause of ranks' waiting in vain, unless the rows of the ranks tell it."""
        diagnosis = self._hangs.diagnosis
        cause = diagnosis.faults[0] if diagnosis is not None and diagnosis.faults else None
        return None if cause is None or cause.kind in _TOLD else cause

    def _pulses(self, others: range, texts: dict[int, str]) -> dict[int, Pulse]:
        """Return the signs of life of the ranks that have not sent a message yet."""
        return {rank: pulse for rank in others if rank not in texts and (pulse := self._pulse(rank))}

    def _may_come(self, at: Rank, pulses: dict[int, Pulse], texts: dict[int, str], waited: float) -> bool:
        """Say whether it is worth waiting: somebody is alive, or left no sign and may be on another host."""
        if any(pulse.is_alive for pulse in pulses.values()):
            return True
        is_unseen = len(texts) + len(pulses) < at.world - 1
        return is_unseen and (waited < _GRACE or self._board is None or not at.is_all_here)

    def _leave(self) -> None:
        self._hangs.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._liveness is not None:
            self._liveness.close()
        if self._board is not None:
            self._board.release()
        self._watchdog = self._liveness = self._board = self._digester = None


def _digester(every: int) -> RankDigester:
    """Return the digester of the ranks' models at each so-many-th step; a fit of one process imports no part of it."""
    from nbguard.training.profiler.instruments.agreement import RankDigester

    return RankDigester(every)
