"""The main thread held still while another thread scans, and Python's garbage collector meanwhile.

PyTorch computes there without Python's lock: a backward pass sets gradients and frees graphs while the scan follows them, and
the process ends with a segmentation fault. So the main thread is asked to wait between two lines of Python,
where nothing of PyTorch's is under way. A fit in a thread of the user's own cannot be asked: there the scan only waits until no
backward pass runs.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import operator
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.scan.roots.frames import frame_of

# --- Python's garbage collector during a scan, which leaves older objects alone and still frees newer ones.
#
# To switch it off would be simpler. But other threads go on, and their garbage would pile up for as long as the scan takes.
# So the young objects are moved to an older generation first, without a collection of any of them, and from then on only the
# youngest generation is collected.


_NEVER = (1 << 31) - 1

_HAS_YOUNG_ONLY = sys.version_info < (3, 14)
"""Whether a collection of the youngest generation is that alone. From 3.14 on each takes a part of the old one as well."""


@contextmanager
def keep_garbage() -> Iterator[None]:
    """Have no present object collected, as the scan's own allocations must not change the objects that it scans.

    A collector that is off stays off. Where functions in `gc.callbacks` would run at each collection, or generations cannot be
    told apart, there is none until the end.
    """
    former = gc.get_threshold()
    if not gc.isenabled() or former[1] == _NEVER:  # the latter: a scan is under way
        yield
        return
    try:
        gc.disable()
        if _HAS_YOUNG_ONLY and not gc.callbacks:
            young = gc.get_objects(generation=0)
            gc.collect(0)  # frees nothing, as `young` holds all of it
            del young
            gc.set_threshold(former[0], _NEVER, _NEVER)
            gc.enable()
        yield
    finally:
        gc.set_threshold(*former)
        gc.enable()


_SETTLED = 0.02
"""Seconds until a main thread that has not come is taken to sit in a call that changes no tensor, as a read or a sleep. It
waits as soon as that returns."""
_PATIENCE = 20.0  # seconds for a backward pass to end
_LONGEST = 10.0  # most seconds that the main thread waits, whatever becomes of the scan
_LEAVES = 1.0  # seconds for the main thread to go on
_EVERY = 0.001
_BACKWARD = ("torch.autograd.graph", "_engine_run_backward")

_TURN = 60.0
"""Most seconds that a scan waits for the end of another thread's."""

_asked: set[_Stop] = set()  # until they have been called, and some time after that: C keeps no reference to them
_paused_for: set[int] = set()  # threads that the main thread waits for already
_turn = threading.Lock()
"""Of the thread whose look it is. At most one call of ours is under way to the main thread: where a debugger or coverage traces
each line, Python 3.11 never gets into a call that was added while another one ran, and the main thread hangs."""
_raise_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(("PyThreadState_SetAsyncExc", ctypes.pythonapi))


def _turn_of_the_child() -> None:
    """In a child that was forked while a thread looked, no thread looks."""
    global _turn
    _turn = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn_of_the_child)


class _Stop:
    """A call of ours on the main thread, between two lines of Python.

    An interrupt that falls into the call is raised again where the main thread goes on. Python raises it at any call or jump of
    the frame that runs, and ctypes would swallow it from there: so the wait is a generator that rests inside its `try` when the
    main thread enters it, and from its last line on the way back to the notebook is made of C functions alone.
    """

    def __init__(self) -> None:
        self.is_here = self._has_gone = self._is_over = False
        self._look = threading.Lock()  # free once the scan is over
        self._look.acquire()
        self._pid = os.getpid()
        wait = self._wait()
        next(wait)
        self.call = ctypes.PYFUNCTYPE(ctypes.c_int)(functools.partial(next, map(operator.not_, wait), 0))  # C wants a 0

    @classmethod
    def asked(cls) -> _Stop:
        """Have the main thread come; where too many ask for it, it does not.

        It may still be on its way to an earlier scan, which ended without it: then it comes to this one.
        """
        _asked.difference_update([stop for stop in _asked if stop._has_gone])
        for stop in _asked:
            if stop._pid == os.getpid() and stop._look.acquire(blocking=False):
                stop._is_over = False
                return stop
        stop = cls()
        _asked.add(stop)
        if ctypes.pythonapi.Py_AddPendingCall(stop.call, None):
            _asked.discard(stop)
        return stop

    def end(self) -> None:
        """Let the main thread go on, and wait until it does. One that comes later does not wait."""
        self._is_over = True
        self._look.release()
        until = time.monotonic() + _LEAVES
        while self.is_here and not self._has_gone and time.monotonic() < until:
            time.sleep(0)

    def _wait(self) -> Iterator[Any]:
        """Rest until the main thread is here, wait for the end of the scan, and have the interrupt that fell in raised again.

        Since Python 3.14 ctypes tells audit hooks of each function that it calls, before it calls it. A hook in Python (the
        package filelock has one) takes an interrupt that comes meanwhile: it is raised again in the place of the first.
        """
        raised: list[type[BaseException] | None] = [None]  # the last one that fell in
        raise_in_main = functools.partial(_raise_in, threading.main_thread().ident or 0)
        raise_again = map(raise_in_main, map(raised.__getitem__, itertools.repeat(0)))  # `yield from` calls C alone
        has_rested, until = False, 0.0
        try:
            while True:
                try:
                    if not has_rested:
                        has_rested = True
                        yield
                    until = until or time.monotonic() + _LONGEST
                    if os.getpid() == self._pid and not self._is_over:  # in a child that was forked meanwhile nobody looks
                        self.is_here = True
                        self._look.acquire(timeout=max(0.0, until - time.monotonic()))
                    break
                except GeneratorExit:  # the main thread never came
                    return
                except BaseException as error:  # noqa: BLE001 - the look goes on, and so does the wait
                    raised[0] = error.__class__
            if raised[0] is None:
                self._has_gone = True
                return
        except BaseException as error:  # noqa: BLE001 - it fell between two turns of the loop
            raised[0] = error.__class__
        while True:
            try:
                self._has_gone = True
                yield from raise_again
            except GeneratorExit:  # long after
                return
            except BaseException as error:  # noqa: BLE001 - a hook took it
                raised[0] = error.__class__


@contextmanager
def pause_main_thread() -> Iterator[None]:
    """Keep the main thread between two lines of Python, unless this is it.

    Raises:
        NbguardError: a backward pass does not end, or another thread's look.
    """
    me = threading.get_ident()
    if me in _paused_for:
        yield
        return
    is_main, turn = me == threading.main_thread().ident, _turn
    if not is_main and not turn.acquire(timeout=_TURN):
        raise NbguardError(f"another thread has been scanning the memory for {_TURN:.0f} s: try again when it is done")
    try:
        stop = _Stop() if is_main else _Stop.asked()
        _paused_for.add(me)
        try:
            _wait_for(stop)
            yield
        finally:
            _paused_for.discard(me)
            stop.end()
    finally:
        if not is_main:
            turn.release()


def _wait_for(stop: _Stop) -> None:
    start = time.monotonic()
    asks = stop in _asked
    while not stop.is_here:
        waited = time.monotonic() - start
        if (waited > _SETTLED or not asks) and not _is_in_backward():
            return
        if waited > _PATIENCE:
            raise NbguardError(f"a backward pass has been running for {_PATIENCE:.0f} s: try again when it ends")
        time.sleep(_EVERY)


def _is_in_backward() -> bool:
    """Say whether another thread is in a backward pass."""
    module, name = _BACKWARD
    code = getattr(getattr(sys.modules.get(module), name, None), "__code__", None)
    return any(_is_in(ident, code) for ident in sys._current_frames() if ident != threading.get_ident())


def _is_in(ident: int, code: types.CodeType | None) -> bool:
    """Say whether a thread runs this code, or something that it has called."""
    return frame_of(code, sys._current_frames().get(ident)) is not None
