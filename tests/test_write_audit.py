"""The watch over what nbguard writes sees what it is to see: a planted write fails a test, in this process and in a kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbguard.files import Folder, append_to_file, write_file
from tests import write_audit
from tests.kernels import Kernel


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is nobody's: from now on tests may write elsewhere alone."""
    (tmp_path / "forbidden").mkdir()
    (tmp_path / "forbidden" / "a").write_text("old")
    (tmp_path / "allowed").mkdir()
    monkeypatch.setenv(write_audit.MAY_WRITE, str((tmp_path / "allowed").resolve()))
    yield tmp_path / "forbidden"
    write_audit.taken()


def reported() -> list[str]:
    """Return the first line of each report: the event and its place."""
    return [line for line in write_audit.taken().splitlines() if line.startswith(("open: ", "os."))]


def test_what_nbguard_writes_elsewhere_is_reported(forbidden: Path) -> None:
    write_file(forbidden / "b", "x")
    events = reported()
    assert {event.partition(" ")[0] for event in events} == {"open:", "os.rename:", "os.remove:"}
    assert all(str(forbidden) in event for event in events)

    append_to_file(forbidden / "a", b"x")
    with Folder(forbidden) as folder:
        folder.rename("a", "c")
        folder.remove("c")
    a, c = (f"{forbidden.resolve()}/{name}" for name in "ac")
    assert reported() == [f"open: {a}", f"os.rename: {a} and {c}", f"os.remove: {c}"]


def test_what_is_the_tests_own_is_not(forbidden: Path) -> None:
    write_file(forbidden.with_name("allowed") / "b", "x")
    (forbidden / "mine").write_text("x")  # by the test itself
    (forbidden / "mine").unlink()

    assert reported() == []


def test_a_process_that_nbguard_did_not_start_is_not_ended_by_it(forbidden: Path) -> None:
    code = compile("import os\ndef end(pid, number): os.kill(pid, number)", f"{write_audit._OURS}planted.py", "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    reading, writing = os.pipe()
    starter = subprocess.Popen([sys.executable, "-c", _STARTER], stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        stranger = int(said.readline())
        starter.wait()

        space["end"](stranger, 0)
        assert reported() == []
        space["end"](stranger, signal.SIGKILL)
        assert reported() == [f"os.kill: process {stranger}"]

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    space["end"](child.pid, signal.SIGKILL)
    child.wait()
    assert reported() == []


_STARTER = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
"""
"""Ends at once: what it has started is a stranger's from then on."""


def test_what_every_test_ends_with_fails_once(forbidden: Path) -> None:
    write_file(forbidden / "b", "x")

    with pytest.raises(AssertionError, match=r"files\.py") as failed:
        write_audit.check()

    assert f"{forbidden.resolve()}/b" in str(failed.value)
    write_audit.check()


def test_kernels_are_watched(plain_kernel: Kernel, tmp_path: Path, forbidden: Path) -> None:
    plain_kernel.run(f"import os; os.environ[{write_audit.MAY_WRITE!r}] = {str(tmp_path / 'allowed')!r}").ok()
    plain_kernel.run(f"from nbguard.files import write_file; write_file({str(forbidden / 'b')!r}, 'x')").ok()
    plain_kernel.run(f"open({str(forbidden / 'c')!r}, 'w').close()").ok()  # by a cell

    events = reported()

    assert {event.partition(" ")[0] for event in events} == {"open:", "os.rename:", "os.remove:"}
    assert not any(event.endswith("/c") for event in events)
