"""`nbguard.watch_ranks`: says which rank, which collective and which line when the ranks of a job wait in vain."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from nbguard.errors import NbguardError
from nbguard.training.ranks.rank import Rank, current_rank, print_once

if TYPE_CHECKING:
    from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis
    from nbguard.training.ranks.call_hook import CallHook
    from nbguard.training.ranks.job_board import JobBoard
    from nbguard.training.ranks.watchdog import HangWatchdog

_ECHO_ANSWERS = 1.0  # seconds that another rank has to say that it failed first
_SIGNAL = "SignalException"
"""Class of the exception that torch's elastic launcher raises in a rank that it ends."""
_running: watch_ranks | None = None


class watch_ranks:  # noqa: N801 - used like a function
    """Watch the ranks of a distributed job in a `with` block, on every rank: `with nbguard.watch_ranks(timeout=60): …`.

    Where a collective makes no progress for `timeout` seconds, a rank dies or one raises, each rank of this host logs a
    warning: which rank, which collective, which line, and what to do. At its first watch each rank prints which one it is.
    In a program of one process nothing is done. The process group may be made before the block or in it, where a wait for
    other ranks is told, too; a rank that no launcher
    numbers (RANK, WORLD_SIZE) makes it before.

    Args:
        timeout: seconds without progress until all ranks are asked where they stand.

    Attributes:
        diagnosis: the last that was made, or None if nothing was amiss.

    Raises:
        NbguardError: `timeout` is no positive number.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        if type(timeout) not in (int, float) or not 0 < timeout < float("inf"):
            raise NbguardError(f"timeout={timeout!r} is not valid: give seconds, as in  nbguard.watch_ranks(timeout=60)")
        self.diagnosis: RankDiagnosis | None = None
        self._timeout = float(timeout)
        self._own: Rank | None = None
        self._board: JobBoard | None = None
        self._hook: CallHook | None = None
        self._watchdog: HangWatchdog | None = None

    def __enter__(self) -> watch_ranks:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop(error)

    def start(self) -> None:
        """Begin to watch, if this process is a rank of several, and none of its watches goes on already."""
        global _running
        self._own = current_rank()
        if self._own is None or _running is not None:
            return
        print_once(self._own)
        with suppress(OSError):  # without a folder of its own there is no watch
            self._start(self._own)
            _running = self

    def stop(self, error: BaseException | None = None) -> None:
        """End the watch, and leave nothing behind once all ranks have; after an error say first whose it was."""
        global _running
        if _running is not self:
            return
        _running = None
        try:
            self._stop(error)
        except Exception as raised:  # a mistake of ours is no error of the user's; a launcher's signal is
            if type(raised).__name__ == _SIGNAL:
                raise

    def _start(self, own: Rank) -> None:
        from nbguard.training.ranks.call_hook import CallHook
        from nbguard.training.ranks.job_board import open_board
        from nbguard.training.ranks.watchdog import HangWatchdog

        self._board = open_board(own)
        self._board.own.note_state("running")
        self._hook = CallHook(self._board.own.calls)
        self._hook.install()
        self._watchdog = HangWatchdog(own, self._board, self._timeout, self._diagnosed)

    def _diagnosed(self, diagnosis: RankDiagnosis) -> None:
        self.diagnosis = diagnosis

    def _stop(self, error: BaseException | None) -> None:
        if self._board is None or self._hook is None or self._watchdog is None:
            return
        self._hook.remove()
        try:
            if isinstance(error, Exception):
                self._failed(error, self._board, self._watchdog)
            else:
                self._watchdog.publish(self._watchdog.facts(state="ended"))
                self._board.own.note_state("ended")
        finally:
            self._watchdog.stop()
            self._board.release()
            self._board = self._hook = self._watchdog = None

    def _failed(self, error: Exception, board: JobBoard, watchdog: HangWatchdog) -> None:
        """Tell the other ranks of an error, and say whether it is this rank's own or an echo of another's."""
        from nbguard.training.ranks.analysis.diagnosis import is_echo
        from nbguard.training.ranks.errors import error_words, leave_for_launcher, raised_at

        board.join()  # before another rank that fails takes its file away
        words = error_words(error)
        if is_echo(words):
            asked = time.time()
        else:
            asked = board.raise_alarm()
            with suppress(Exception):  # the launcher does without it
                leave_for_launcher(error)
        facts = asked, words, raised_at(error), _ECHO_ANSWERS
        saying = threading.Thread(target=watchdog.report, args=facts, name="nbguard-first-error", daemon=True)
        saying.start()
        try:
            saying.join()
        except BaseException:  # the launcher ends this rank, too: it has a second to say why
            saying.join(2 * _ECHO_ANSWERS)
            raise
