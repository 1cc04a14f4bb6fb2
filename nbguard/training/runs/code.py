"""The code behind a run, in cells of the notebook and the user's own modules, and the state of the working tree."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbguard.files import read_file
from nbguard.memory.core.processes import session_name
from nbguard.memory.scan.scan import Notebook
from nbguard.training.runs.analysis.cell_seeds import cells_behind
from nbguard.training.runs.analysis.record import RunCell
from nbguard.training.runs.analysis.source import clean_source
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.fingerprint import bytes_hash

# --- The state of the working tree, asked of git in a few bounded questions that change nothing, not even its index.


_PATIENCE = 2.0
"""Seconds for each question. A tree so large that it takes longer is not waited for."""

_MOST = 20_000
"""Characters of the changes."""

_FILES_NAMED = 20
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
    for name in names[:_FILES_NAMED]:
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


_CELL = 10_000
"""Characters of a cell's source on record."""
_CELLS = 200
_NOTEBOOK = 20 * 1024**2
"""Most bytes of a notebook's file that is read, to say which cells were edited since they ran."""
_SOURCE = 20 * 1024**2
"""Most bytes of a module's file that is read."""
_FILES = 200
_NAMES = 5


def notebook_path(namespace: dict[str, Any]) -> Path | None:
    """Return the notebook that this kernel runs, where its server or VS Code tells; None otherwise."""
    for told in (session_name(os.environ), namespace.get("__vsc_ipynb_file__")):
        if type(told) is str and told.endswith(".ipynb"):
            return Path(told)
    return None


def names_of(notebook: Notebook, *objects: Any) -> list[str]:
    """Return the names of the user's for these very objects."""
    ids = {id(each) for each in objects if each is not None}
    own = list(notebook.namespace.items())
    return [name for name, value in own if type(name) is str and not name.startswith("_") and id(value) in ids][:_NAMES]


def collect_cells(
    facts: FactCollector, notebook: Notebook, names: Sequence[str], path: Path | None, *, is_fit: bool
) -> tuple[RunCell, ...]:
    """Return the cells that the names come from, as they ran; each says whether the saved notebook has it otherwise now."""
    cells = notebook.inputs
    if not cells:
        facts.miss("code", "cells", "without IPython the cells that ran are not known")
        return ()
    roles = cells_behind(cells, names, len(cells) - 1, is_fit=is_fit)
    saved = _saved_sources(facts, path)
    typed = _typed(notebook.shell, cells)
    made = []
    for number, role in list(roles.items())[-_CELLS:]:
        source = typed[number]
        edited = "" if saved is None else "no" if source.strip() in saved else "yes"
        made.append(RunCell(number=number, source=clean_source(source[:_CELL]), role=role, edited=edited))
    return tuple(made)


def _typed(shell: Any, cells: Sequence[str]) -> Sequence[str]:
    """Return the cells as the user typed them; with magics as Python where IPython does not tell."""
    raw = getattr(getattr(shell, "history_manager", None), "input_hist_raw", None)
    return raw if type(raw) is list and len(raw) == len(cells) else cells


def _saved_sources(facts: FactCollector, path: Path | None) -> frozenset[str] | None:
    """Return the sources of the cells in the notebook's file; None, with the reason on record, where they are not known."""
    if path is None:
        facts.miss("code", "edited since", "this notebook's name is not known")
        return None
    try:
        cells = json.loads(read_file(path, _NOTEBOOK))["cells"]
        return frozenset(_joined(cell.get("source", "")).strip() for cell in cells if cell.get("cell_type") == "code")
    except OSError as error:
        facts.miss("code", "edited since", f"the saved notebook cannot be read ({error.strerror})")
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        facts.miss("code", "edited since", f"the saved notebook cannot be read ({type(error).__name__})")
        return None


def _joined(source: Any) -> str:
    return "".join(source) if type(source) is list else str(source)


def collect_modules(facts: FactCollector, folder: Path) -> None:
    """Collect a hash of the source of each imported module that lies below the folder of the run: the user's own."""
    roots = tuple(f"{path}{os.sep}" for path in (folder.absolute(), folder.resolve()))
    own = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__") if type(module) is type(sys) else None
        if type(path) is str and path.endswith(".py") and _is_own(path, roots):
            own.append((name, Path(path)))
    for name, source in sorted(own)[:_FILES]:
        try:
            facts.add("code", f"module {name}", bytes_hash(read_file(source, _SOURCE)))
        except OSError:
            facts.miss("code", f"module {name}", "its file can no longer be read")


def _is_own(path: str, roots: tuple[str, ...]) -> bool:
    return path.startswith(roots) and "site-packages" not in path and f"{os.sep}nbguard{os.sep}" not in path
