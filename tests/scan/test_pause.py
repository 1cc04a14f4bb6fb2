"""The main thread waits while another one looks, and whatever happens then, it goes on."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nbguard.errors import NbguardError
from nbguard.memory.scan import pause
from nbguard.memory.scan.pause import pause_main_thread

pytestmark = pytest.mark.usefixtures("frozen_libraries")

LOOKS = """
import gc, threading, time
import torch, torch._dynamo, nbguard

gc.collect()
gc.freeze()  # a look is at the fit's objects for most of its time
torch.set_num_threads(1)
nn = torch.nn
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 512), nn.ReLU(inplace=True), nn.Linear(512, 64))])
optimizer = torch.optim.Adam(model.parameters())
names, steps, ended = {"model": model, "optimizer": optimizer}, 0, threading.Event()

def look():
    try:
        for _ in range(40):
            nbguard.report(names)
            time.sleep(0.01)
    finally:
        ended.set()

threading.Thread(target=look).start()
while not ended.is_set():
    names["loss"] = loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
print(steps)
"""


def test_a_look_beside_a_fit_is_no_crash() -> None:
    """A backward pass sets gradients and frees graphs without Python's lock: a look at these ended the process."""
    pytest.importorskip("torch")
    ran = subprocess.run(
        [sys.executable, "-c", LOOKS], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )

    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 4


def _beside(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `act` in another thread; what it returns or raises is in the list once the thread has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_the_main_thread_waits_and_goes_on() -> None:
    count = 0

    def hold() -> tuple[int, int, int]:
        with pause_main_thread(), pause_main_thread():
            first = count
            time.sleep(0.2)
            last = count
        time.sleep(0.2)
        return first, last, count

    thread, found = _beside(hold)
    while thread.is_alive():
        count += 1

    ((first, last, after),) = found
    assert last - first <= 1 < after - last  # the step that it is in


def test_a_main_thread_in_a_long_call_is_not_waited_for_and_waits_when_it_returns() -> None:
    took: list[float] = []

    def hold() -> float:
        start = time.monotonic()
        with pause_main_thread():
            took.append(time.monotonic() - start)
            time.sleep(1.6)
            return time.monotonic()

    thread, found = _beside(hold)
    time.sleep(1)
    returned = time.monotonic()
    thread.join()

    assert took[0] < 1
    assert found[0] <= returned


def test_an_interrupt_arrives_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, and raised in the code that runs, not at the end of a look that it had to wait for."""
    monkeypatch.setattr(pause, "_SETTLED", 60)  # the look waits for the main thread, however busy the machine is
    has_begun = threading.Event()

    def hold() -> float:
        has_begun.wait(60)
        with pause_main_thread():
            _thread.interrupt_main()
            time.sleep(0.2)
            return time.monotonic()

    def runs() -> None:
        has_begun.set()
        while not found:  # an interrupt in `Thread.is_alive` would have Python 3.11 take the thread for ended
            pass
        time.sleep(5)

    thread, found = _beside(hold)
    with pytest.raises(KeyboardInterrupt):
        runs()
    interrupted = time.monotonic()
    thread.join()

    assert 0 <= interrupted - found[0] < 2


class _Look:
    """Stands for the lock that the main thread waits for: each call of `acquire` has the next events happen."""

    def __init__(self, turns: Sequence[Sequence[Callable[[], Any]]]) -> None:
        self.turns = list(turns)

    def acquire(self, timeout: float) -> None:
        for event in self.turns.pop(0):
            event()

    def release(self) -> None:
        pass


@pytest.mark.parametrize(
    ("as_it_comes", "on_the_way", "in_the_wait"),
    [
        ("I", "", ["E"]),  # the interrupt falls into the first step of the call
        ("I", "", ["I", "E"]),
        ("EI", "", []),  # the look is over by then
        ("", "I", ["E"]),
        ("", "EI", []),
        ("E", "I", []),
        ("", "", ["I", "E"]),
        ("", "", ["I", "I", "E"]),
        ("", "", ["EI"]),
    ],
)
def test_an_interrupt_is_never_lost(
    as_it_comes: str, on_the_way: str, in_the_wait: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt (I) and the end of the look (E) in every order, at each step of the main thread: no clock decides."""
    stop, lost, is_over = pause._Stop(), list[Any](), list[bool]()
    events = {"I": lambda: signal.raise_signal(signal.SIGINT), "E": stop.end}
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    monkeypatch.setattr(stop, "_look", _Look([[events[event] for event in turn] for turn in in_the_wait]))
    todo, getpid = [events[event] for event in on_the_way], os.getpid

    def on_its_way() -> int:
        while todo:
            todo.pop(0)()
        return getpid()

    monkeypatch.setattr(os, "getpid", on_its_way)
    if "E" in as_it_comes:
        stop.end()
    calls: list[Any] = [(stop.call, None)]
    if "I" in as_it_comes:
        calls.insert(0, (ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p), ctypes.c_void_p(signal.SIGINT)))

    @ctypes.PYFUNCTYPE(ctypes.c_int)
    def come_at_once() -> int:
        """Add the calls from a call of their kind: none of them begins before it returns.

        Since Python 3.14 ctypes tells audit hooks of each function that it calls. A hook in Python, of another test or of
        filelock, would take the interrupt between the two calls.
        """
        return sum(itertools.starmap(ctypes.pythonapi.Py_AddPendingCall, calls))

    tracer = sys.gettrace()
    sys.settrace(None)  # a traced function of Python 3.11 never begins in a pending call that another one has added
    try:
        ctypes.pythonapi.Py_AddPendingCall(come_at_once, None)
        for _ in range(100):
            pass
    except KeyboardInterrupt:
        is_over.append(stop._is_over)
    finally:
        sys.settrace(tracer)

    assert (is_over, lost) == ([True], [])  # raised once, in the cell, and only when the look was over


HOOKED = """
import ctypes, os, signal, sys
from nbguard.memory.scan import pause

armed, lost, state = [], [], "not raised"
def hook(event, arguments):
    if event == "ctypes.call_function" and armed:
        signal.raise_signal(armed.pop())
def wait(timeout):
    stop._is_over = True
    signal.raise_signal(signal.SIGINT)
class Look:
    release, acquire = (lambda self: None), (lambda self, timeout: wait(timeout))
getpid = os.getpid
def on_its_way():
    armed[:] = [signal.SIGINT] * 2
    return getpid()

sys.addaudithook(hook)
sys.unraisablehook = lost.append
signal.signal(signal.SIGINT, signal.default_int_handler)
stop = pause._Stop()
stop._look, os.getpid = Look(), on_its_way
try:
    ctypes.pythonapi.Py_AddPendingCall(stop.call, None)
    for _ in range(100):
        pass
except BaseException as error:
    state = type(error).__name__
print(state, stop._is_over, len(armed), len(lost))
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="ctypes tells audit hooks of no function that it calls")
def test_an_interrupt_in_an_audit_hook_is_not_lost() -> None:
    """Two more interrupts, each while the hook runs that is told of the call which raises the first one again."""
    ran = subprocess.run(
        [sys.executable, "-c", HOOKED], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )

    assert (ran.stdout, ran.stderr) == ("KeyboardInterrupt True 0 0\n", "")


def _look_often() -> None:
    for _ in range(40):
        with pause_main_thread():
            time.sleep(0.002)


@pytest.mark.parametrize("is_traced", [False, True])
def test_looks_of_several_threads_end_under_a_debugger_too(is_traced: bool) -> None:
    """Python 3.11 looped for ever where lines were traced and a second look asked while the first one had the main thread."""
    tracer = sys.gettrace()
    if is_traced:
        sys.settrace(lambda *_: None)
    try:
        looks = [_beside(_look_often) for _ in range(3)]
        while any(thread.is_alive() for thread, _ in looks):
            os.getpid()
    finally:
        sys.settrace(tracer)

    assert [found for _, found in looks] == [[None]] * 3


def test_a_main_thread_that_comes_late_waits_for_the_look_that_goes_on_then() -> None:
    """The call that an earlier look has left behind is taken over, so that there is never more than one."""

    def looks() -> float:
        time.sleep(0.3)
        with pause_main_thread():  # the main thread is in a long call, and does not come
            pass
        with pause_main_thread():
            time.sleep(1.5)
            return time.monotonic()

    asked = len(pause._asked)
    thread, found = _beside(looks)
    time.sleep(1)
    returned, added = time.monotonic(), len(pause._asked) - asked
    thread.join()

    assert found[0] <= returned
    assert added <= 1


def test_a_look_that_waits_too_long_for_another_threads_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_TURN", 0.1)

    def look() -> None:
        with pause_main_thread():
            pass

    with pause._turn:
        thread, found = _beside(look)
        thread.join()

    assert "another thread has been scanning the memory" in str(found[0])
    thread, found = _beside(look)
    thread.join()
    assert found == [None]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_takes_over_no_call_of_its_parents() -> None:
    """Its main thread would pass it by: only a look of this process is waited for."""
    left = pause._Stop()
    left.end()
    pause._asked.add(left)
    pid = os.fork()
    if pid == 0:
        os._exit(8 if pause._Stop.asked() is left else 7)
    pause._asked.discard(left)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_look_that_never_ends_stops_nobody_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_LONGEST", 0.2)
    end = threading.Event()

    def hold() -> None:
        with pause_main_thread():
            end.wait(20)

    thread, _ = _beside(hold)
    start = time.monotonic()
    while time.monotonic() - start < 0.5:
        pass
    end.set()
    thread.join()

    assert time.monotonic() - start < 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_that_is_forked_meanwhile_goes_on() -> None:
    stop = pause._Stop()
    pid = os.fork()
    if pid == 0:
        stop.call()
        os._exit(8 if stop.is_here else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_on_the_main_thread_nothing_is_asked() -> None:
    before = set(pause._asked)
    with pause_main_thread(), pause_main_thread():
        assert pause._asked == before
    assert not pause._paused_for


def test_a_backward_pass_that_does_not_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_PATIENCE", 0.1)
    monkeypatch.setattr(pause, "_is_in_backward", lambda: True)

    with pytest.raises(NbguardError, match="a backward pass has been running"), pause_main_thread():
        pass
    assert not pause._paused_for


def test_a_fit_in_a_thread_of_the_users_is_seen() -> None:
    torch = pytest.importorskip("torch")

    inside, go_on = threading.Event(), threading.Event()
    x = torch.ones(3, requires_grad=True)

    def hook(grad: Any) -> None:
        inside.set()
        go_on.wait(20)

    x.register_hook(hook)
    thread, _ = _beside((x * 2).sum().backward)
    try:
        assert inside.wait(20)
        during = pause._is_in_backward()
    finally:
        go_on.set()
        thread.join()

    assert (during, pause._is_in_backward()) == (True, False)
