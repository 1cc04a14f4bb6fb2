"""The state of the working tree, asked of git in a few bounded questions that change nothing, not even its index."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from nbguard.runs.analysis.secrets import without_secrets
from nbguard.runs.collector import FactCollector

_PATIENCE = 2.0
"""Seconds for each question. A tree so large that it takes longer is not waited for."""

_MOST = 20_000
"""Characters of a diff."""

_NOTEBOOKS = ":(exclude,glob)**/*.ipynb"
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--")
_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks")


def collect_git(facts: FactCollector, folder: Path) -> str:
    """Collect commit, branch and what is changed; return the diff since the commit, without notebooks and secrets."""
    try:
        return _collect(facts, folder)
    except FileNotFoundError:
        facts.miss("git", "commit", "git is not installed, or the folder of the process is gone")
    except subprocess.TimeoutExpired:
        facts.miss("git", "commit", f"git took longer than {_PATIENCE:.0f} s")
    return ""


def _collect(facts: FactCollector, folder: Path) -> str:
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
    diff = _ask(folder, *_DIFF, top.strip(), _NOTEBOOKS) or ""
    kept = without_secrets(diff[:_MOST])
    return kept if len(diff) <= _MOST else f"{kept}\n… {len(diff) - _MOST:,} characters more"


def _ask(folder: Path, *question: str) -> str | None:
    """Return what git answers; None where it refuses."""
    command = ["git", *_SAFE, *question]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    asked = subprocess.run(  # noqa: S603 - git itself, without a shell
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
    )
    return asked.stdout.decode("utf-8", "replace") if asked.returncode == 0 else None
