"""Processes as the system shows them: this very machine's, real ones."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbguard.memory.cleanup.plan.orphans import diagnose
from nbguard.memory.core.facts import NvmlFacts, ProcessFact
from nbguard.memory.core.processes import Identity
from nbguard.memory.scan.devices import processes as probe
from tests.kernels import wait_until
from tests.other_users import VICTIM, needs_root

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds what stands for a GPU's files open, and says when it does."""
    code = "import sys; held = [open(name) for name in sys.argv[1:]]; print('ready', flush=True); sys.stdin.read()"
    for name in ("nvidia0", "nvidia-uvm"):
        (tmp_path / name).touch()
    names = [str(tmp_path / "nvidia0"), str(tmp_path / "nvidia-uvm")]
    found = subprocess.Popen([sys.executable, "-c", code, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    assert found.stdout.readline() == "ready\n"
    yield found
    found.kill()
    found.communicate()


def test_a_process_is_known_by_its_start_too(child: subprocess.Popen[str]) -> None:
    process = probe.process_of(child.pid)
    assert process is not None
    assert probe.is_alive(process)
    assert probe.is_child(process)
    assert not probe.is_alive(replace(process, started=process.started - 1))

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its entry is left
    assert probe.process_of(child.pid) is None
    assert not probe.is_alive(process)
    assert probe.is_listed(process)
    child.wait()
    assert not probe.is_listed(process)


def test_memory_that_comes_back_is_its_own(child: subprocess.Popen[str]) -> None:
    private = probe.private_bytes(child.pid)

    assert private is not None
    assert 0 < private < 1 << 30
    assert probe.private_bytes(2**22 + 1) is None


@linux
def test_who_keeps_a_device_open_is_found_without_the_driver(
    child: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a forked worker does that has outlived its kernel: no list of the driver's has it."""
    monkeypatch.setattr(probe.NvmlReader, "everybody", lambda self: {})
    assert child.pid not in {each.process.pid for each in probe.device_processes()[0]}
    monkeypatch.setattr(probe, "_MEMORY", str(tmp_path / "nvidia-uvm"))
    monkeypatch.setattr(probe, "_DEVICE", re.compile(re.escape(str(tmp_path)) + r"/nvidia\d+$"))

    found = {each.process.pid: each for each in probe.device_processes()[0]}

    assert set(found) == {child.pid}
    assert found[child.pid].holds_files
    assert found[child.pid].devices == ()
    assert found[child.pid].used is None
    assert found[child.pid].ancestors[0] == os.getpid()
    assert found[child.pid].is_forked is False
    assert found[child.pid].is_elsewhere is False
    assert found[child.pid].owner == tuple(map(str, os.getresuid()))


@linux
def test_a_fork_without_exec_is_known_as_one() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert probe._is_forked(pid) is True
        assert probe._is_forked(os.getpid()) is False
        assert probe._is_forked(2**22 + 1) is None
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(pid, 0)


def test_surroundings_are_this_process() -> None:
    around = probe.surroundings()

    assert around.pid == os.getpid()
    assert os.getppid() in around.ancestors
    assert around.pid not in around.ancestors


_ID = "1b4f4f6e-9d4e-4a7e-8c1d-0123456789ab"
_SLEEPS = "print('ready', flush=True); __import__('time').sleep(600)"
Run = Callable[..., Identity]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run(*command, notebook=…, user=…)` starts a program and returns who that is in NVML's list; this is `mine.ipynb`."""
    monkeypatch.setenv("JPY_SESSION_NAME", "mine.ipynb")
    monkeypatch.setattr(probe, "_FIRST_NAMESPACE", Path("/proc/self/ns/pid").stat().st_ino)
    (tmp_path / "train.py").write_text(_SLEEPS)
    (tmp_path / "ipykernel_launcher.py").write_text(_SLEEPS)
    children: list[subprocess.Popen[str]] = []

    def start(*command: str, notebook: str = "", user: int | None = None) -> Identity:
        child = subprocess.Popen(
            command,
            env={"JPY_SESSION_NAME": notebook},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=user,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        driver = NvmlFacts(9, 2, (ProcessFact(os.getpid(), 1), ProcessFact(child.pid, 1), ProcessFact(2**22 + 1, 1)))
        known = probe.identified(driver)
        assert known is not None
        assert known.processes is not None
        mine, found, gone = known.processes
        assert mine.identity is gone.identity is None
        assert found.identity is not None
        return found.identity

    yield start
    for child in children:
        child.kill()
        child.communicate()


@linux
def test_a_process_is_named_by_its_notebook_else_by_its_program(run: Run, tmp_path: Path) -> None:
    python = sys.executable
    kernel = (python, "-m", "ipykernel_launcher", "-f", f"/run/kernel-{_ID}.json")
    for command, notebook, words, short in (
        (kernel, "/a/b c.ipynb", "/a/b c.ipynb", "b c.ipynb"),
        (kernel, "", f"a kernel started in {tmp_path.name}", f"a kernel started in {tmp_path.name}"),
        ((python, "train.py"), "/a/b.ipynb", "/a/b.ipynb", "b.ipynb"),
        ((python, "train.py", "--lr", "1"), "", "train.py", "train.py"),
        ((python, "-c", _SLEEPS), "mine.ipynb", "this notebook's own processes", "this notebook's own processes"),
        ((python, "-c", f"from multiprocessing.spawn import spawn_main; {_SLEEPS}"), "", *["a multiprocessing worker"] * 2),
    ):
        found = run(*command, notebook=notebook)
        assert (found.words, found.short, found.user) == (words, short, "")
        assert found.kernel == (_ID if command is kernel else "")


@linux
@needs_root
def test_another_users_process_has_the_name_of_its_user(run: Run) -> None:
    # No `exec` after the word: /proc shows no environment while a program is being replaced.
    found = run("/bin/sh", "-c", "echo ready; read line", notebook="/home/her/x.ipynb", user=VICTIM)

    assert found.user == str(VICTIM)  # for which this machine has no name
    assert found.words == f"{found.user}: /home/her/x.ipynb"  # as an administrator may read it
    assert replace(found, notebook="", program="").words == f"processes of {found.user}"


def test_listed_pids_are_believed_only_where_they_are_known_to_be_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = Path("/proc/self/ns/pid")
    if namespace.exists():
        monkeypatch.setattr(probe, "_FIRST_NAMESPACE", namespace.stat().st_ino)  # also where the tests run in a container
    assert probe._seen_here({7, 9}) == {7, 9}
    monkeypatch.setattr(probe, "_FIRST_NAMESPACE", 0)
    monkeypatch.setattr(probe, "_MEMORY", str(tmp_path / "absent"))
    monkeypatch.setattr(probe, "_holds_device_files", lambda pid: pid == 9)
    if namespace.exists():
        assert probe._seen_here({7, 9}) == set()
        assert probe._seen_here({7, os.getpid()}) == {7, os.getpid()}
        monkeypatch.setattr(probe, "_MEMORY", str(tmp_path))
        assert probe._seen_here({7, 9, os.getpid()}) == {9}


# --- who has started whom ---------------------------------------------------------------------------------------------------

_WORKER = "import time; print('ready', flush=True); time.sleep(600)"
_PARENT = """
import os, subprocess, sys, time
if "session" in sys.argv: os.setsid()
child = subprocess.Popen([sys.argv[2], "-c", sys.argv[1]], start_new_session="own" in sys.argv, stdout=subprocess.PIPE)
child.stdout.readline()
if "leaves" in sys.argv: os.setsid()
print(child.pid, flush=True)
if "dies" in sys.argv: os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def family() -> Iterator[Callable[..., probe.DeviceProcess]]:
    """`family(*how, name)` starts a parent of that name with a worker, and returns the worker's facts."""
    parents: list[subprocess.Popen[str]] = []
    workers: list[int] = []

    def start(*how: str, name: str = "python") -> probe.DeviceProcess:
        command = [name, "-c", _PARENT, _WORKER, sys.executable, *how]
        parents.append(subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True))
        output = parents[-1].stdout
        assert output is not None
        workers.append(int(output.readline()))
        if "dies" in how:
            parents[-1].wait()
        found = probe.process_facts(workers[-1], (), True)
        assert found is not None
        return found

    yield start
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for parent in parents:
        parent.kill()
        parent.communicate()


@linux
@pytest.mark.parametrize("name", ["python", "init", "tini", "systemd", "conmon", "/sbin/init", "train.py: epoch 3"])
@pytest.mark.parametrize("how", [(), ("session",), ("own",), ("session", "own"), ("leaves",)])
def test_a_worker_whose_parent_lives_is_no_orphan_whatever_that_is_called(
    family: Callable[..., probe.DeviceProcess], name: str, how: tuple[str, ...]
) -> None:
    found = family(*how, name=name)

    assert found.parent_command is not None
    assert found.parent_command[0] == name
    assert not found.is_adopted
    assert not found.is_parent_gone
    spawned = replace(found, command=(sys.executable, "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"))
    diagnosed = diagnose(spawned, replace(probe.surroundings(), pid=1 << 30, ancestors=frozenset()))
    assert not diagnosed.is_orphan
    assert "its parent lives" in diagnosed.reason


@linux
def test_a_worker_whose_parent_has_died_is_an_orphan(family: Callable[..., probe.DeviceProcess]) -> None:
    found = family("session", "dies")

    assert found.is_adopted or found.is_parent_gone
    spawned = replace(found, command=(sys.executable, "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"))
    diagnosed = diagnose(spawned, replace(probe.surroundings(), pid=1 << 30, ancestors=frozenset()))
    assert diagnosed.is_orphan, diagnosed.reason


@linux
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes a container: needs root and unshare")
@pytest.mark.parametrize("name", ["my-notebooks", "tini", "init"])
def test_a_containers_first_process_may_be_the_parent(name: str) -> None:
    """As where a server with an interpreter of its own is all that runs in a container."""
    inside = f"""
import os, subprocess, sys
from dataclasses import replace
from nbguard.memory.cleanup.plan.orphans import diagnose
from nbguard.memory.scan.devices import processes as probe
assert os.getpid() == 1
child = subprocess.Popen([{sys.executable!r}, "-c", {_WORKER!r}], stdout=subprocess.PIPE)
child.stdout.readline()
command = ("python", "-c", "from multiprocessing.spawn import spawn_main")
found = replace(probe.process_facts(child.pid, (), True), command=command)
around = probe.surroundings()
diagnosed = diagnose(found, replace(around, pid=1 << 30, ancestors=frozenset()))
child.kill()
print(found.is_contained, found.parent_command[0], diagnosed.is_orphan, diagnosed.reason)
"""
    named = f'exec -a {name} "$0" -c "$1"'
    container = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", named, sys.executable, inside]
    packages = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # by that name Python does not find its environment
    said = subprocess.run(container, env=packages, capture_output=True, text=True, timeout=60, check=False)

    assert said.stdout.startswith(f"True {name} False "), said


@pytest.mark.parametrize(
    ("sockets", "has_clients"),
    [
        ((("LISTEN", ("127.0.0.1", 1)),), False),
        ((("LISTEN", ("127.0.0.1", 1)), ("ESTABLISHED", ("127.0.0.1", 1), ("127.0.0.1", 7))), True),
        ((("LISTEN", 1), ("ESTABLISHED", 1, 7), ("ESTABLISHED", 7, 1)), False),  # with itself
        ((("NONE", "/run/kernel-1-ipc-1"),), None),
        ((("LISTEN", ("127.0.0.1", 1)), ("NONE", "/run/kernel-1-ipc-1")), None),
        ((("LISTEN", ("127.0.0.1", 1)), ("NONE", "")), False),
        ((), None),
    ],
)
def test_clients_are_known_of_what_listens_to_the_network_alone(sockets: tuple[Any, ...], has_clients: bool | None) -> None:
    """F22 of the red team: of a kernel with the transport `ipc` the system does not show who is connected."""
    connections = [SimpleNamespace(status=status, laddr=laddr, raddr=(*to, ())[0]) for status, laddr, *to in sockets]

    assert probe._has_clients(SimpleNamespace(net_connections=lambda kind: connections)) is has_clients


@linux
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_kernel_without_clients(tmp_path: Path, transport: str) -> None:
    """A kernel whose server and connection file are gone is left over where it listens to the network, and else unknown."""
    pytest.importorskip("ipykernel")
    file = tmp_path / "kernel-1.json"
    ip = "127.0.0.1" if transport == "tcp" else str(tmp_path / "socket")
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(file), f"--transport={transport}", f"--ip={ip}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as kernel:
        try:
            wait_until(file.exists, "the kernel's connection file", within=120)
            wait_until(lambda: probe._has_clients(probe._entry(kernel.pid)) is not True, "the kernel to listen", within=60)
            file.unlink()
            found = probe.process_facts(kernel.pid, (), True)
        finally:
            kernel.kill()

    assert found is not None
    assert found.connection is False
    assert found.has_clients is (False if transport == "tcp" else None)
