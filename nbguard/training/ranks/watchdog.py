"""The thread, and its waker, that notices that a rank waits for ever, asks all ranks for their facts, tells the diagnosis."""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from nbguard.errors import RankFactsError
from nbguard.files import open_file
from nbguard.render.text import blocks_text
from nbguard.training.ranks.analysis.causes import diagnosed
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis, RankPlace
from nbguard.training.ranks.analysis.facts import Caller, CollectiveCall, JobFacts, RankFacts, RankState, from_text, to_text
from nbguard.training.ranks.analysis.flight_dump import CALL, rendezvous_wait
from nbguard.training.ranks.analysis.launch_errors import nccl_notes
from nbguard.training.ranks.flight_recorder import group_ranks, progress, recorded_calls, warm_up
from nbguard.training.ranks.job_board import JobBoard, MainThread
from nbguard.training.ranks.meeting_point import is_meeting, meeting_point
from nbguard.training.ranks.rank import Rank
from nbguard.training.ranks.rank_file import RankFile

# --- The waker of the watchdog's thread: the end of the watch, and SIGTERM, which waits until the thread reported its facts.
#
# A launcher ends all ranks by SIGTERM within a tenth of a second of the first that fails. Its default action would be the end
# of this process before anything is said. A handler of the program's own is left alone.


Wake: TypeAlias = Literal["", "end", "terminated"]

_END = b"\0"  # signals have numbers from 1 on
_held: Waker | None = None


class Waker:
    """Wakes one thread. Made and closed by the main thread, it holds SIGTERM back in between."""

    def __init__(self) -> None:
        global _held
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self._before = -1
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and _held is None and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
            if self._before == -1:
                _held = self
                signal.signal(signal.SIGTERM, _terminated)
            else:
                signal.set_wakeup_fd(self._before)

    def wait(self, seconds: float) -> Wake:
        """Return the event within so many seconds, if any."""
        try:
            self._reads.settimeout(seconds)
            came = self._reads.recv(64)
        except (TimeoutError, BlockingIOError):
            return ""
        except OSError:  # it has been closed meanwhile
            return "end"
        if _END in came:
            return "end"
        return "terminated" if bytes([signal.SIGTERM]) in came else ""

    def end(self) -> None:
        """Wake the thread for the last time."""
        with suppress(OSError):
            self._writes.send(_END)

    def close(self) -> None:
        """Give SIGTERM its former handler back; called once the thread has ended."""
        global _held
        if _held is self:
            _held = None
            if threading.current_thread() is threading.main_thread():
                _let_go()
        self._reads.close()
        self._writes.close()

    def terminate(self) -> None:
        """Wake the thread as SIGTERM does."""
        with suppress(OSError):
            self._writes.send(bytes([signal.SIGTERM]))


def _terminated(_number: int, _frame: object) -> None:
    """Leave the end of the process to the thread; without a watch do SIGTERM's default action."""
    if _held is not None:
        _held.terminate()
    else:
        _let_go()
        os.kill(os.getpid(), signal.SIGTERM)


def _let_go() -> None:
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _not_in_the_child() -> None:
    """A worker is forked without the thread: SIGTERM ends it at once."""
    global _held
    if _held is not None:
        _held = None
        _let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_in_the_child)


_READ = 1 << 20  # bytes at the end of the file


def notes_of_nccl() -> tuple[str, ...]:
    """Return the notes on NCCL's log of this process; none where it writes none to a file."""
    name = os.environ.get("NCCL_DEBUG_FILE", "")
    if not name:
        return ()
    path = Path(name.replace("%h", platform.node()).replace("%p", str(os.getpid())))
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ))
            return nccl_notes(file.read(_READ).decode("utf-8", "replace"))
    except OSError:
        return ()


_EVERY = 0.5  # seconds between two looks
_ANSWERS = 2.5  # seconds that the other ranks have to answer an alarm
_LAST_ANSWERS = 1.0  # seconds that they have once this rank is being ended
_FRESH = 2.0  # seconds that facts of another rank may be older than the alarm: it has been stuck for longer
_log = logging.getLogger("nbguard")


class HangWatchdog:
    """Watches this rank, and answers the alarms of others. `timeout`: seconds without progress; `found` gets each diagnosis."""

    def __init__(self, own: Rank, board: JobBoard, timeout: float, found: Callable[[RankDiagnosis], None]) -> None:
        self._own, self._board, self._timeout, self._found = own, board, timeout, found
        self._main = MainThread()
        self._handled = time.time()
        self._speaking = threading.Lock()
        self._said: set[tuple[object, ...]] = set()
        self._warming: threading.Thread | None = None
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="nbguard-watch-ranks", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._waker.end()
        self._thread.join(5)
        if self._warming is not None:
            self._warming.join(5)
        self._waker.close()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # noqa: BLE001 - a mistake of ours is one line, and the program goes on without the watch
            _log.warning("nbguard's watch of rank %d ended: %s: %s", self._own.rank, type(error).__name__, error)

    def _watch(self) -> None:
        state: object = None
        moved = time.monotonic()
        is_reported = False
        while (wake := self._waker.wait(min(_EVERY, self._timeout / 4))) != "end":
            if wake == "terminated":
                self._terminated()
            self._board.join()
            groups = progress()
            self._main.look()
            meets = not groups and is_meeting()
            now = groups, self._board.own.calls.count, meets or self._waits(groups)
            if now != state:
                state, moved, is_reported = now, time.monotonic(), False
            waited = time.monotonic() - moved if now[2] else 0.0
            if self._warming is None and not meets and (waited >= self._timeout / 2 or self._board.is_alarm_near()):
                self._board.own.warn()
                self._warming = threading.Thread(target=warm_up, name="nbguard-warm-up", daemon=True)
                self._warming.start()
            is_stuck = waited >= self._timeout
            asked = self._board.alarm()
            if asked > self._handled:
                self.report(asked)
            elif meets:
                if is_stuck and not is_reported:
                    is_reported = True
                    self._say(self._meeting())
            elif not is_reported and (is_stuck or (waited > _EVERY / 2 and self._lost_one())):
                is_reported = True
                self.report(self._board.raise_alarm())

    def _terminated(self) -> None:
        """Say why a rank has failed, if one has, and end this process as SIGTERM would have done without the watch."""
        try:
            if self._lost_one() or any(file.state == "raised" for file in self._board.others().values()):
                self.report(self._board.raise_alarm(), patience=_LAST_ANSWERS)
            self._board.own.note_state("ended")
            self._board.clean()
        finally:
            os._exit(128 + signal.SIGTERM)

    def _waits(self, groups: tuple[tuple[str, int, int], ...]) -> bool:
        """Say whether a call of this rank has not come to its end."""
        return any(begun > ended for _, begun, ended in groups) or self._board.own.calls.waits()

    def _lost_one(self) -> bool:
        """Say whether another rank of this host died in the watch."""
        return any(file.state == "running" and not file.is_alive for file in self._board.others().values())

    def report(
        self, asked: float, error: str = "", at: tuple[str, Caller] = ("", ""), patience: float = _ANSWERS
    ) -> RankDiagnosis | None:
        """Publish the facts of this rank, wait for those of the others, and say what they come to, once for each cause."""
        with self._speaking:
            self._handled = max(self._handled, asked)
            own = self.facts(error, at)
            self.publish(own)
            if error:
                self._board.own.note_state("raised")  # now that the others can read which
            others = self._answers(asked, patience)
            diagnosis = diagnosed(JobFacts(self._own.world, tuple(sorted((own, *others), key=lambda facts: facts.rank))))
            if not diagnosis.faults:
                return None
            self._say(diagnosis)
            return diagnosis

    def _say(self, diagnosis: RankDiagnosis) -> None:
        """Log the cause of a diagnosis, and hand it on, once for each cause."""
        cause = diagnosis.faults[0]
        key = cause.kind, cause.ranks, cause.place
        if key not in self._said:
            self._said.add(key)
            self._found(diagnosis)
            words = blocks_text(tuple(diagnosis.blocks()))
            _log.warning("nbguard, rank %d: %s\n%s", self._own.rank, cause.what, words)

    def _meeting(self) -> RankDiagnosis:
        """Return the diagnosis of this rank, which waits for the others to meet it."""
        standing = self._main.standing()
        line, stack = ("", ()) if standing is None else (standing.line, standing.stack)
        place = RankPlace(rank=self._own.rank, state="running", calls=0, waits_in=CALL, stands=line, stack=stack)
        return rendezvous_wait(place, self._own.world, meeting_point())

    def publish(self, facts: RankFacts) -> None:
        """Let the other ranks read facts of this one."""
        self._board.own.write("facts", to_text(facts))

    def facts(self, error: str = "", at: tuple[str, Caller] = ("", ""), state: RankState = "running") -> RankFacts:
        """Return the facts of this rank; `at` is the line, and the part of DDP, that raised its error."""
        standing = self._main.standing() if state == "running" and not error else None
        line, caller = at if standing is None else (standing.line, standing.caller)
        return RankFacts(
            rank=self._own.rank,
            world=self._own.world,
            host=platform.node(),
            pid=os.getpid(),
            state="raised" if error else state,
            calls=_placed(joined(recorded_calls(), self._board.own.calls.read()), line, caller),
            groups=group_ranks(),
            stands=line,
            function="" if standing is None else standing.function,
            stack=() if standing is None else standing.stack,
            since=round(self._main.since, 1),
            works=standing is not None and self._main.works(),
            error=error,
            error_place=line if error else "",
            error_caller=caller if error else "",
            at=time.time(),
            nccl=notes_of_nccl(),
        )

    def _answers(self, asked: float, patience: float) -> list[RankFacts]:
        """Return the facts of the other ranks: those that they answer with; of a rank that does not, its log."""
        asked -= min(_FRESH, self._timeout / 2)
        facts: dict[int, RankFacts] = {}
        others = [rank for rank in range(self._own.world) if rank != self._own.rank]
        until = time.monotonic() + patience
        while True:
            files = self._board.others()
            for rank in others:
                file = files.get(rank)
                answer = None if file is None else _published(file)
                is_gone = file is not None and file.state == "running" and not file.is_alive
                is_final = answer is not None and answer.state in ("raised", "ended")
                if answer is not None and (answer.at >= asked or is_final) and not (is_gone and not is_final):
                    facts[rank] = answer
                elif file is not None:
                    state: RankState = "died" if is_gone else file.state
                    known = answer or RankFacts(rank=rank, world=self._own.world, groups=group_ranks())
                    calls = joined(known.calls, file.calls.read())
                    facts[rank] = replace(known, state=state, pid=file.process.pid, calls=calls, at=0.0)
            is_complete = all(rank in facts and (facts[rank].at >= asked or facts[rank].state != "running") for rank in others)
            if is_complete or time.monotonic() > until:
                return [facts.get(rank) or RankFacts(rank=rank, world=self._own.world) for rank in others]
            time.sleep(0.02)


def _published(file: RankFile) -> RankFacts | None:
    """Return the facts that a rank has published, or None."""
    text = file.read("facts")
    if text is None:
        return None
    with suppress(RankFactsError):
        return from_text(text)
    return None


def joined(recorded: tuple[CollectiveCall, ...], logged: tuple[CollectiveCall, ...]) -> tuple[CollectiveCall, ...]:
    """Return the recorder's calls with the log's additional facts on them, and the log's own: messages, calls not recorded."""
    known = {(call.group, call.position): call for call in logged if not call.is_p2p}
    calls = []
    for call in recorded:
        noted = known.pop((call.group, call.position), None)
        if noted is not None and not call.caller and call.place in ("", noted.place):
            calls.append(replace(noted, is_done=call.is_done))
        else:
            calls.append(call)
    last = {call.group: call.position for call in recorded}
    calls += [call for call in known.values() if call.position > last.get(call.group, 0)]
    return (*calls, *(call for call in logged if call.is_p2p))


def _placed(calls: tuple[CollectiveCall, ...], line: str, caller: Caller) -> tuple[CollectiveCall, ...]:
    """Return the calls, the one that waits without a line with that of the main thread."""
    return tuple(
        replace(call, place=line, caller=caller) if not call.is_done and not call.place and line else call for call in calls
    )
