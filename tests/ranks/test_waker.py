"""SIGTERM while ranks are watched: it waits for the thread, not for the main thread, and not in a forked worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

from nbguard.training.ranks.watchdog import Waker

SCRIPT = """
import os, signal, sys, threading, time
from nbguard.training.ranks.watchdog import Waker

def work():
    if waker.wait(60) == "terminated":
        print("said", flush=True)
        os._exit(128 + signal.SIGTERM)

waker = Waker()
thread = threading.Thread(target=work, daemon=True)
thread.start()
reads, writes = os.pipe()
child = os.fork() if sys.argv[1] == "fork" else 1
if child == 0:
    os.write(writes, b".")
    time.sleep(60)
    os._exit(7)
if sys.argv[1] == "fork":
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    print("child", -os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
if sys.argv[1] == "closed":
    waker.end()
    thread.join()
    waker.close()
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()  # as a collective does, it runs no handler of Python's
"""


def run(case: str) -> tuple[int, list[str]]:
    """Return the status of a program that gets SIGTERM while its main thread waits, and what it has printed."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, case], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline().strip()]
        while lines[-1] not in ("ready", ""):
            lines.append(program.stdout.readline().strip())
        program.send_signal(signal.SIGTERM)
        rest, _ = program.communicate(timeout=60)
    return program.returncode, [*lines, *rest.split()]


def test_the_thread_speaks_before_the_process_ends() -> None:
    assert run("watched") == (128 + signal.SIGTERM, ["ready", "said"])


def test_a_forked_worker_ends_at_once() -> None:
    assert run("fork") == (128 + signal.SIGTERM, [f"child {-signal.SIGTERM}", "ready", "said"])


def test_after_the_watch_the_signal_ends_the_process_as_ever() -> None:
    assert run("closed") == (-signal.SIGTERM, ["ready"])


def test_a_handler_of_the_programs_own_is_left_alone() -> None:
    def own(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        waker = Waker()
        assert signal.getsignal(signal.SIGTERM) is own
        waker.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_stays_of_a_waker() -> None:
    files = sum(1 for _ in Path("/dev/fd").iterdir())
    waker = Waker()
    assert waker.wait(0) == ""
    thread = threading.Thread(target=waker.end)
    thread.start()
    thread.join()
    assert waker.wait(60) == "end"
    waker.close()

    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    assert sum(1 for _ in Path("/dev/fd").iterdir()) == files
