"""Real processes on the fake device: the orphans among them are found and ended, verified by pid, and nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbguard.memory.core.processes import pids_text
from tests.cuda.conftest import Notebook, report
from tests.fake_cuda.launch import environment
from tests.fake_cuda.plugin import fake_settings
from tests.panels import Panel

MIB = 1 << 20
CONTEXT = 300 * MIB

OPEN = """
import ctypes, os, sys, threading, time
def end_with(pid):
    while os.path.exists(f'/proc/{pid}'): time.sleep(1)
    os._exit(0)
def use_device(name):
    tests = os.environ.get('TESTS_PID') or os.getppid()  # where the tests are killed, nobody else ends this process
    threading.Thread(target=end_with, args=(tests,), daemon=True).start()
    cuda = ctypes.CDLL('libcuda.so.1')
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0) == 0
    with open(name + '.tmp', 'w') as file: file.write(str(os.getpid()))
    os.rename(name + '.tmp', name)
    time.sleep(600)
"""
SPAWNER = (
    OPEN
    + """
import multiprocessing
if __name__ == '__main__':
    multiprocessing.get_context('spawn').Process(target=use_device, args=(sys.argv[1],)).start()
    while not os.path.exists(sys.argv[1]): time.sleep(.02)
    if 'dies' in sys.argv: os._exit(0)
    time.sleep(600)
"""
)
PLAIN = OPEN + "use_device(sys.argv[1])"
DETACHED = """
import os, subprocess, sys
if os.fork(): os._exit(0)
os.setsid()
subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os._exit(0)
"""
NO_REAL_DEVICE = "import nbguard.memory.scan.devices.processes as probe; probe._MEMORY = '/dev/null/absent'"
"""On a machine with a GPU, what really is on it is none of these tests' business: they end what they find."""

Start = Callable[..., int]


def _wait(done: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in (("spawner.py", SPAWNER), ("plain.py", PLAIN)):
        (tmp_path / name).write_text(code)
    return tmp_path


@pytest.fixture
def start(folder: Path, fake_cuda_library: Path) -> Iterator[Start]:
    """`start(name, *argv)` runs Python on the device and returns the pid of who opened it, as it wrote into the file `name`."""
    env = environment(fake_settings(state=folder / "state", context=CONTEXT), fake_cuda_library)
    known: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def run(name: str, *argv: object, detached: bool = False, notebook: str = "") -> int:
        command = [sys.executable, *map(str, argv)]
        if detached:
            command = [sys.executable, "-c", DETACHED, *command]
        # In a session of its own: where the tests are in that of the first process, which adopts orphans, none can be told.
        process = subprocess.Popen(
            command,
            env={**env, "JPY_SESSION_NAME": notebook, "TESTS_PID": str(os.getpid())},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        children.append(process)
        _wait(lambda: (folder / name).exists())
        known.append(int((folder / name).read_text()))
        return known[-1]

    yield run
    for pid in known:
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        child.kill()
        child.wait(20)


def _kernel(folder: Path, name: str) -> tuple[str, ...]:
    """Return the arguments of a real kernel that opens the device when it starts, and forks a worker that does, too."""
    ports = {f"{port}_port": at for at, port in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
    connection = {"transport": "ipc", "ip": str(folder / f"{name}-socket"), "key": "k", "signature_scheme": "hmac-sha256"}
    (folder / f"{name}.json").write_text(json.dumps({**connection, **ports, "kernel_name": ""}))
    forked, itself = (folder / f"{name}-fork", folder / name)
    code = OPEN.replace("time.sleep(600)", "return")
    code += f"if not os.fork(): use_device({str(forked)!r}); time.sleep(600)\nuse_device({str(itself)!r})"
    lines = f"--IPKernelApp.exec_lines={code}"
    return ("-m", "ipykernel_launcher", "-f", str(folder / f"{name}.json"), lines, "--HistoryManager.hist_file=:memory:")


@pytest.mark.slow
def test_only_orphans_are_ended(notebook: Notebook, start: Start, folder: Path) -> None:
    kernel = notebook(state=folder / "state", context=CONTEXT, bytes=16384 * MIB)
    kernel.run(f"x = mib(1)\n{NO_REAL_DEVICE}").ok()
    orphan = start("orphan", "spawner.py", "orphan", "dies")
    working = start("working", "spawner.py", "working")
    plain = start("plain", "plain.py", "plain")
    nohup = start("nohup", "plain.py", "nohup", detached=True)
    live = start("live", *_kernel(folder, "live"), detached=True)
    dying = start("dying", *_kernel(folder, "dying"), detached=True)
    _wait(lambda: (folder / "dying-fork").exists() and (folder / "live-fork").exists())
    fork, live_fork = (int((folder / f"{name}-fork").read_text()) for name in ("dying", "live"))
    os.kill(dying, signal.SIGKILL)
    kernel.run(f"import subprocess; own = subprocess.Popen([{sys.executable!r}, '{folder}/plain.py', '{folder}/own'])").ok()
    _wait(lambda: (folder / "own").exists())
    own = int((folder / "own").read_text())
    everybody = {orphan, working, plain, nohup, live, live_fork, fork, own}
    try:
        listed = kernel.run("%reset_gpu --zombies -o found").ok().text
        rows = dict(kernel.value("[(each.found.process.pid, (each.is_orphan, each.reason)) for each in found.diagnosed]"))
        untouched = [pid for pid in everybody if not _runs(pid)]
        only = kernel.run(f"%reset_gpu --zombies --yes {plain} {live} {nohup}").ok().text
        still = [pid for pid in everybody if not _runs(pid)]
        kernel.run("%reset_gpu --zombies --yes -o done").ok()
        gone = {pid for pid in everybody if not _runs(pid)}
        again = kernel.run("%reset_gpu --zombies --yes").ok().text
    finally:
        for pid in (fork, live_fork, own):
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)

    assert set(rows) == everybody
    assert {pid for pid, (is_orphan, _) in rows.items() if is_orphan} == {orphan, fork}
    assert rows[orphan][1] == "a multiprocessing worker whose parent died"
    assert rows[fork][1] == "forked by a dead kernel"
    assert "a live kernel: its connection file is there" in rows[live][1]
    assert "its parent lives" in rows[live_fork][1] or "of a live kernel" in rows[live_fork][1]
    assert "a program of its own without a parent" in rows[nohup][1]
    assert "its parent lives" in rows[working][1]
    assert "its parent lives" in rows[plain][1]
    assert "started by this kernel" in rows[own][1]
    assert "600 MiB of device memory" in listed
    assert untouched == still == []
    assert "nothing to end" in only
    assert gone == {orphan, fork}
    assert kernel.value("(sorted(done.ended), done.remaining)") == (sorted([orphan, fork]), ())
    assert "nothing to end" in again
    assert kernel.run("%reset_gpu --hard").ok().text.count("left alone: ") >= 5


def test_others_are_named_by_their_notebooks(notebook: Notebook, start: Start, folder: Path, fake_cuda_library: Path) -> None:
    """In the report, the panel, the list, the card, and the terminal: a kernel with its worker, a program, one of its own."""
    own, other = str(folder / "mine.ipynb"), str(folder / "course" / "the other.ipynb")
    kernel = notebook(state=folder / "state", context=CONTEXT, bytes=2048 * MIB)
    kernel.run(f"os.environ['JPY_SESSION_NAME'] = {own!r}; x = mib(1)\n{NO_REAL_DEVICE}").ok()
    theirs = start("other", *_kernel(folder, "other"), notebook=other)
    plain = start("plain", "plain.py", "plain")
    mine = start("mine", "plain.py", "mine", notebook=own)
    _wait(lambda: (folder / "other-fork").exists())
    fork = int((folder / "other-fork").read_text())

    (device,) = report(kernel)["devices"]
    text = kernel.run("%gpumem").ok().text
    listed = kernel.run("%reset_gpu --zombies").ok().text
    panel = Panel(kernel)
    panel.hello()
    tick = panel.until(lambda tick: tick["neighbours"])
    panel.stop()
    kernel.run("with_others = mib(1200)")
    card = kernel.run("%gpumem oom").ok().text
    env = environment(fake_settings(state=folder / "state", context=CONTEXT), fake_cuda_library)
    run = "import os; os.getpid = lambda: next(iter(NvmlReader().__enter__().everybody()))\n"  # as if it were no container
    code = f"from nbguard.memory.scan.devices.nvml import NvmlReader\n{NO_REAL_DEVICE}\n{run}"
    code += "from nbguard.frontend.cli import main\nmain(['gpus'])"
    gpus = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    found = {each["pid"]: (each["used"], each["identity"]) for each in device["others"]}
    assert {pid: used for pid, (used, _) in found.items()} == dict.fromkeys((theirs, fork, plain, mine), CONTEXT)
    assert [found[pid][1]["notebook"] for pid in (theirs, fork, plain, mine)] == [other, other, "", own]
    assert sum(part["nbytes"] for part in device["parts"] if part["name"] == "others") == 4 * CONTEXT
    who = f"the other.ipynb 600 MiB ({pids_text([theirs, fork])})"
    for said in (text, card):
        assert other not in said  # a notebook is shared with its outputs
        assert who in said
        assert f"plain.py 300 MiB (pid {plain})" in said
        assert f"this notebook's own processes 300 MiB (pid {mine})" in said
    assert f"the other.ipynb in {folder}"[:30] in listed
    assert {(each[2], each[3]) for each in tick["neighbours"]} == {
        ("the other.ipynb", 2 * CONTEXT),
        ("plain.py", CONTEXT),
        ("this notebook's own processes", CONTEXT),
    }
    rows = {row[1]: row for line in gpus.splitlines() if (row := line.split()) and row[0] == "0"}
    assert {str(pid) for pid in (theirs, fork, plain, mine)} < set(rows)
    assert "the other.ipynb" in gpus


def test_pids_of_another_namespace_are_not_diagnosed(notebook: Notebook, start: Start, folder: Path) -> None:
    """Where NVML speaks of the host's pids, they are nobody here, whatever runs under the same number."""
    kernel = notebook(state=folder / "state", context=CONTEXT, nvml="host-pids")
    kernel.run(f"x = mib(1)\n{NO_REAL_DEVICE}; probe._FIRST_NAMESPACE = 0").ok()
    orphan = start("orphan", "spawner.py", "orphan", "dies")

    text = kernel.run("%reset_gpu --zombies --yes").ok().text

    assert _runs(orphan)
    assert "pids of another namespace" in text


def test_a_pid_that_was_given_away_gets_no_signal(notebook: Notebook, start: Start, folder: Path) -> None:
    """Known by pid and start: a process that has the pid of an orphan by now is another."""
    kernel = notebook(state=folder / "state", context=CONTEXT)
    kernel.run(f"x = mib(1)\n{NO_REAL_DEVICE}").ok()
    orphan = start("orphan", "spawner.py", "orphan", "dies")
    kernel.run(
        "from dataclasses import replace\nfrom nbguard.memory.cleanup.apply.steps import find_zombies, end_orphans\n"
        "listed = find_zombies()\n"
        "first = listed.diagnosed[0]\n"
        "earlier = replace(first.found.process, started=first.found.process.started - 5)\n"
        "stale = replace(listed, diagnosed=(replace(first, found=replace(first.found, process=earlier)),))\n"
        "done = end_orphans(stale)"
    ).ok()

    assert kernel.value("first.found.process.pid") == orphan
    assert _runs(orphan)
