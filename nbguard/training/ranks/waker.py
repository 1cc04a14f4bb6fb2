"""The waker of the watchdog's thread: the end of the watch, and SIGTERM, which waits until the thread reported its facts.

A launcher ends all ranks by SIGTERM within a tenth of a second of the first that fails. Its default action would be the end of
this process before anything is said. A handler of the program's own is left alone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Literal, TypeAlias

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
