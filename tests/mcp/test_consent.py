"""The file of a consent: who may read it, and which files are believed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nbguard.frontend.mcp.consent import consents, give, take_back


def test_a_consent_is_private_and_names_its_kernel(tmp_path: Path) -> None:
    consent, file = give(tmp_path / "kernel-1.json", "a.ipynb")

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.parent == tmp_path
    assert consents(tmp_path) == [consent]
    assert (consent.connection, consent.pid, consent.notebook) == ("kernel-1.json", os.getpid(), "a.ipynb")
    assert len(consent.token) >= 32
    assert consent.token not in file.name

    take_back(consent, file)
    assert list(tmp_path.iterdir()) == []
    take_back(consent, file)
    assert consents(tmp_path / "nowhere") == []


def test_jupyter_does_not_take_it_for_a_connection_file(tmp_path: Path) -> None:
    """`jupyter console --existing` looks for the newest `kernel-*.json`, or for a part of a name."""
    _, file = give(tmp_path / "kernel-abc.json", "")

    assert not file.match("kernel-*.json")
    assert "abc" not in file.name


@pytest.mark.parametrize(
    "change",
    [
        {"connection": "../elsewhere.json"},
        {"connection": "/etc/passwd"},
        {"id": "another"},
        {"pid": 0},
        {"pid": "1"},
        {"started": 1.0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_that_is_not_as_it_was_written_is_no_consent(tmp_path: Path, change: dict[str, Any]) -> None:
    _, file = give(tmp_path / "kernel.json", "")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    assert consents(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"0" * 100_000])
def test_a_damaged_file_is_no_consent(tmp_path: Path, content: bytes) -> None:
    _, file = give(tmp_path / "kernel.json", "")
    file.write_bytes(content)

    assert consents(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions of this system are others")
def test_a_file_that_others_can_read_or_a_link_is_no_consent(tmp_path: Path) -> None:
    _, file = give(tmp_path / "kernel.json", "")
    file.chmod(0o644)
    assert consents(tmp_path) == []

    file.chmod(0o600)
    moved = file.rename(tmp_path / "moved")
    file.symlink_to(moved)
    assert consents(tmp_path) == []


def test_the_consent_of_a_kernel_that_was_killed_is_none_and_goes(tmp_path: Path) -> None:
    program = "import sys, pathlib; from nbguard.frontend.mcp.consent import give; give(pathlib.Path(sys.argv[1]), '')"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "kernel.json")], check=True, cwd=Path.cwd())
    (left,) = tmp_path.iterdir()

    assert consents(tmp_path) == []
    consent, file = give(tmp_path / "kernel.json", "")
    assert not left.exists()
    assert consents(tmp_path) == [consent]
    assert file.exists()
