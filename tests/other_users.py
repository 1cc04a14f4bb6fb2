"""Another user of this machine: code that runs as that user, where the tests run as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VICTIM, ATTACKER = 2001, 2002
ROOT = Path(__file__).resolve().parents[1]

ARE_REAL = sys.platform == "linux" and os.getuid() == 0
"""Whether files can be made that are another user's."""
needs_root = pytest.mark.skipif(not ARE_REAL, reason="only root can be two users; the same rules are tested with one elsewhere")

_AS = """
import csv, io, json, logging, multiprocessing.util, os, pkgutil, signal, sys, tempfile, time, traceback
from pathlib import Path
{imports}
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
os.umask(0o022)
{code}
"""
"""Privileges go once all is imported: a virtual environment in root's home folder is closed to others."""


def run_as(uid: int, code: str, *, imports: str = "", within: float = 60, **variables: str) -> str:
    """Run code as a user and return what it printed; fail if it raises, or hangs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent", **variables}
    program = _AS.format(imports=imports, uid=uid, code=code)
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=within, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def folder_of(uid: int, path: Path, mode: int = 0o755) -> Path:
    """Make a folder that is a user's."""
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def file_of(uid: int, path: Path, text: str, age: float = 0) -> Path:
    """Make a file that is a user's, and as old as that many seconds."""
    path.write_text(text)
    os.chown(path, uid, uid)
    status = path.stat()
    os.utime(path, (status.st_atime - age, status.st_mtime - age))
    return path


def link_of(uid: int, path: Path, target: Path) -> Path:
    """Make a symbolic link that is a user's."""
    path.symlink_to(target)
    os.lchown(path, uid, uid)
    return path
