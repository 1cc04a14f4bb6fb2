"""Ending real processes: the word that each listens to, an interrupt between two, and one that is no orphan any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from nbguard.memory.cleanup.apply import steps as actions
from nbguard.memory.cleanup.plan.orphans import diagnose
from nbguard.memory.core import advice
from nbguard.memory.core.processes import DeviceProcess, DiagnosedProcess, Zombies
from nbguard.memory.scan.devices.processes import is_alive, process_facts, process_of, surroundings
from tests.kernels import is_gone

_QUIET = "import time; print('ready', flush=True); time.sleep(600)"
_DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _QUIET
Start = Callable[[str], DiagnosedProcess]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(code)` runs Python and returns the process, diagnosed an orphan; it is diagnosed so again until told otherwise."""
    children: list[subprocess.Popen[str]] = []
    known: dict[int, DiagnosedProcess] = {}

    def run(code: str) -> DiagnosedProcess:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        process = process_of(child.pid)
        assert process is not None
        known[child.pid] = DiagnosedProcess(DeviceProcess(process=process, devices=(("GPU 0", 1),)), True, "made for a test")
        return known[child.pid]

    monkeypatch.setattr(actions, "find_zombies", lambda pids: Zombies(diagnosed=tuple(known[pid] for pid in pids)))
    monkeypatch.setattr(actions, "_PATIENCE", {signal.SIGTERM: 0.5, signal.SIGKILL: 10.0})
    yield run
    for child in children:
        child.kill()
        child.communicate()


def _pid(diagnosed: DiagnosedProcess) -> int:
    return diagnosed.found.process.pid


def test_each_listens_to_its_own_word(start: Start) -> None:
    quiet, deaf = start(_QUIET), start(_DEAF)

    done = actions.end_orphans(Zombies(diagnosed=(quiet, deaf)))

    assert (done.asked, done.ended, done.remaining) == (True, (_pid(quiet), _pid(deaf)), ())
    assert not is_alive(quiet.found.process)
    assert not is_alive(deaf.found.process)
    assert [os.waitpid(_pid(each), 0)[1] for each in (quiet, deaf)] == [signal.SIGTERM, signal.SIGKILL]


def test_one_that_is_no_orphan_by_now_gets_no_signal(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    found = start(_QUIET)
    monkeypatch.setattr(actions, "find_zombies", lambda pids: Zombies())

    done = actions.end_orphans(Zombies(diagnosed=(found,)))

    assert is_alive(found.found.process)
    assert (done.ended, done.remaining) == ((), ((_pid(found), "it is no longer an orphan on a GPU"),))


def test_one_that_has_ended_by_itself_is_gone(start: Start) -> None:
    found = start(_QUIET)
    os.kill(_pid(found), signal.SIGKILL)
    os.waitid(os.P_PID, _pid(found), os.WEXITED | os.WNOWAIT)

    assert actions.end_orphans(Zombies(diagnosed=(found,))).ended == (_pid(found),)


def test_an_interrupt_stops_before_the_next_and_the_report_is_true(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "_PATIENCE", {signal.SIGTERM: 60.0})
    deaf, quiet = start(_DEAF), start(_QUIET)
    ours = signal.signal(signal.SIGINT, lambda *_: None)  # as a shell may have set it: what is there comes back
    there = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()

    try:
        done = actions.end_orphans(Zombies(diagnosed=(deaf, quiet)))
        timer.join()
        assert signal.getsignal(signal.SIGINT) is there
    finally:
        signal.signal(signal.SIGINT, ours)

    assert done.interrupted
    assert done.ended == ()
    assert done.remaining == ((_pid(deaf), "interrupted while it was being ended"), (_pid(quiet), "interrupted"))
    assert is_alive(deaf.found.process)
    assert is_alive(quiet.found.process)


def test_joblibs_workers_are_ended_by_the_line_that_is_printed_for_them() -> None:
    joblib = pytest.importorskip("joblib")
    pids = set(joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(os.getpid)() for _ in range(8)))
    workers = [process for pid in pids if (process := process_facts(pid)) is not None]
    around = surroundings()

    reasons = {diagnose(worker, around).reason for worker in workers}
    assert workers
    assert not any("--workers" in reason for reason in reasons)
    line = advice.end_joblib_workers().command
    assert all(line in reason for reason in reasons)
    exec(line, {})
    assert all(is_gone(pid, within=20) for pid in pids)
