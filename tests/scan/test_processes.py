"""Processes as the system shows them: this very machine's, real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nbguard.scan.devices import processes as probe

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


def test_listed_pids_are_believed_only_where_they_are_known_to_be_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe._seen_here({7, 9}, ()) == {7, 9} or not Path("/proc/self/ns").exists()
    monkeypatch.setattr(probe, "_FIRST_NAMESPACE", 0)
    monkeypatch.setattr(probe, "_MEMORY", str(tmp_path / "absent"))
    if Path("/proc/self/ns").exists():
        assert probe._seen_here({7, 9}, {9}) == set()
        assert probe._seen_here({7, os.getpid()}, ()) == {7, os.getpid()}
        monkeypatch.setattr(probe, "_MEMORY", str(tmp_path))
        assert probe._seen_here({7, 9, os.getpid()}, {9}) == {9}
