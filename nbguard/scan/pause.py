"""The main thread held still while another thread looks.

What PyTorch computes there, it computes without Python's lock: a backward pass sets gradients and frees graphs while the look
follows them, and the process ends with a segmentation fault. So the main thread is asked to wait between two lines of Python,
where nothing of PyTorch's is under way. A fit in a thread of the user's own cannot be asked: there the look only waits until no
backward pass runs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager

from nbguard.errors import NbguardError
from nbguard.scan.roots.frames import frame_of

_SETTLED = 0.02
"""Seconds after which a main thread that has not come is taken to sit in a call that changes no tensor: a read, a sleep. It
waits as soon as that returns."""
_PATIENCE = 20.0  # seconds for a backward pass to end
_LONGEST = 10.0  # seconds that the main thread waits at most, whatever becomes of the look
_EVERY = 0.001
_BACKWARD = ("torch.autograd.graph", "_engine_run_backward")

_asked: set[_Stop] = set()  # until they have been called, and some time after that: C keeps no reference to them
_still: set[int] = set()  # threads for which the main thread waits already


class _Stop:
    """A call of ours on the main thread, between two lines of Python."""

    def __init__(self) -> None:
        self.is_here = self._has_gone = self._is_over = False
        self._look = threading.Lock()  # free once the look is over
        self._look.acquire()
        self._raised: type[BaseException] | None = None  # by a signal, for the cell that waits
        self._pid = os.getpid()
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._wait)

    def ask(self) -> None:
        """Have the main thread come; where too many ask for it, it does not."""
        _asked.difference_update([each for each in _asked if each._has_gone])
        _asked.add(self)
        if ctypes.pythonapi.Py_AddPendingCall(self._call, None):
            _asked.discard(self)

    def end(self) -> None:
        """Let the main thread go on. An interrupt that came meanwhile is the cell's: it gets it now."""
        self._is_over = True
        self._look.release()
        main = threading.main_thread().ident or 0
        while self.is_here and _is_in(main, type(self)._wait.__code__):
            time.sleep(_EVERY)
        if self._raised is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(self._raised))

    def _wait(self, _: object) -> int:
        end = time.monotonic() + _LONGEST
        while os.getpid() == self._pid and not self._is_over:  # nobody would end it in a child that was forked meanwhile
            try:
                self.is_here = True
                self._look.acquire(timeout=max(0.0, end - time.monotonic()))
                break
            except BaseException as error:  # noqa: BLE001 - here it would be lost
                self._raised = type(error)
        self._has_gone = True
        return 0


@contextmanager
def pause_main_thread() -> Iterator[None]:
    """Keep the main thread between two lines of Python, unless this is it.

    Raises:
        NbguardError: a backward pass does not end.
    """
    me = threading.get_ident()
    if me in _still:
        yield
        return
    stop = _Stop()
    if me != threading.main_thread().ident:
        stop.ask()
    _still.add(me)
    try:
        _wait_for(stop)
        yield
    finally:
        _still.discard(me)
        stop.end()


def _wait_for(stop: _Stop) -> None:
    start = time.monotonic()
    asks = stop in _asked
    while not stop.is_here:
        waited = time.monotonic() - start
        if (waited > _SETTLED or not asks) and not _is_in_backward():
            return
        if waited > _PATIENCE:
            raise NbguardError(f"a backward pass has been running for {_PATIENCE:.0f} s: look again once it has ended")
        time.sleep(_EVERY)


def _is_in_backward() -> bool:
    """Say whether another thread is in a backward pass."""
    module, name = _BACKWARD
    code = getattr(getattr(sys.modules.get(module), name, None), "__code__", None)
    return any(_is_in(ident, code) for ident in sys._current_frames() if ident != threading.get_ident())


def _is_in(ident: int, code: types.CodeType | None) -> bool:
    """Say whether a thread runs this code, or something that it has called."""
    return frame_of(code, sys._current_frames().get(ident)) is not None
