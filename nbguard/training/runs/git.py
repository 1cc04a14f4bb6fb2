"""The state of the working tree, asked of git in a few bounded questions that change nothing, not even its index."""

from __future__ import annotations

import difflib
import os
import subprocess
import time
from pathlib import Path

from nbguard.files import read_file
from nbguard.training.runs.analysis.source import clean_source
from nbguard.training.runs.collector import FactCollector

_PATIENCE = 2.0
"""Seconds for each question. A tree so large that it takes longer is not waited for."""

_MOST = 20_000
"""Characters of the changes."""

_FILES = 20
_LARGEST = 200_000
"""Bytes of a file whose changes are on record."""

_CHANGED = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--name-only", "-z", "HEAD", "--", ":(top,glob)**/*.py")
_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks")


def collect_git(facts: FactCollector, folder: Path, *, has_code: bool = True) -> str:
    """Collect commit, branch and the names of changed files; return the changes of Python files since the commit.

    Secrets are taken out of both versions of a file before they are compared: a hunk does not tell where a string begins.
    With `has_code` False no code is read.
    """
    try:
        return _collect(facts, folder, has_code=has_code)
    except FileNotFoundError:
        facts.miss("git", "commit", "git is not installed, or the folder of the process is gone")
    except subprocess.TimeoutExpired:
        facts.miss("git", "commit", f"git took longer than {_PATIENCE:.0f} s")
    return ""


def _collect(facts: FactCollector, folder: Path, *, has_code: bool) -> str:
    top = _ask(folder, "rev-parse", "--show-toplevel")
    if top is None:
        facts.miss("git", "commit", f"{folder.name or folder} is in no git repository")
        return ""
    commit = _ask(folder, "rev-parse", "HEAD")
    if commit is None:
        facts.miss("git", "commit", "the repository has no commit yet")
        return ""
    facts.add("git", "commit", commit.strip())
    facts.add("git", "branch", (_ask(folder, "rev-parse", "--abbrev-ref", "HEAD") or "?").strip())
    if remote := (_ask(folder, "config", "--get", "remote.origin.url") or "").strip():
        facts.add("git", "repository", remote)
    status = (_ask(folder, "status", "--porcelain", "--untracked-files=normal") or "").splitlines()
    changed = sorted(line[3:] for line in status if not line.startswith("??"))
    facts.add("git", "dirty", bool(changed))
    facts.add("git", "untracked", sum(line.startswith("??") for line in status))
    if changed:
        facts.add("git", "changed", ", ".join(changed))
    return _changes(folder, Path(top.strip())) if has_code and changed else ""


def _changes(folder: Path, top: Path) -> str:
    """Return how the Python files that git tracks differ from the commit, as a unified diff; time and length are bounded."""
    deadline = time.monotonic() + _PATIENCE
    names = [name for name in (_ask(folder, *_CHANGED) or "").split("\0") if name]
    parts = []
    for name in names[:_FILES]:
        if time.monotonic() > deadline:
            break
        before = _ask(folder, "cat-file", "blob", f"HEAD:{name}") or ""
        after = _text(top / name)
        if len(before) <= _LARGEST and after is not None:
            lines = (clean_source(before).splitlines(), clean_source(after).splitlines())
            parts.append("\n".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}", lineterm="")))
    diff = "\n".join(part for part in parts if part)
    left = len(names) - len(parts)
    more = f"\n… and {left} files more" if left else ""
    return f"{diff}{more}" if len(diff) <= _MOST else f"{diff[:_MOST]}\n… {len(diff) - _MOST:,} characters more{more}"


def _text(path: Path) -> str | None:
    """Return a file's text, empty if it is gone; None where it is no file of its own or too large."""
    try:
        return None if path.is_symlink() else read_file(path, _LARGEST).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def _ask(folder: Path, *question: str) -> str | None:
    """Return git's answer, or None where it refuses."""
    command = ["git", *_SAFE, *question]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    asked = subprocess.run(  # noqa: S603 - git itself, without a shell
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
    )
    return asked.stdout.decode("utf-8", "replace") if asked.returncode == 0 else None
