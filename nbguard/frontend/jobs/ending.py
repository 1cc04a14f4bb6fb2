"""The end of a process by an error, with an out-of-memory card, a report in a folder, and a mark in a workflow of GitHub's."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbguard.errors import in_one_line, line_of
from nbguard.frontend.jobs.failures import RankFailure
from nbguard.frontend.jobs.folder import place_of_process, write_failure
from nbguard.memory.out_of_memory.card import build_card
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.oom.chain import find_in_chain, ran_out
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.render.text import blocks_text, workflow_command
from nbguard.training.ranks.errors import error_words, errors_of


def words_on(error: BaseException, report: Path | None) -> str:
    """Return all that is to be said of an error that ends its process, and leave its report; empty for most errors.

    Something is said where it ran out of memory. With a folder, any error leaves a report. A mistake of ours costs a line.
    """
    try:
        return "\n".join(_lines(error, report))
    except Exception as ours:  # noqa: BLE001 - the process ends by its own error, and with its own status
        return f"nbguard: there is no out-of-memory card, by a mistake in nbguard ({in_one_line(ours)} at {line_of(ours)})"


def _lines(error: BaseException, report: Path | None) -> Iterator[str]:
    is_oom = ran_out(error)
    if not (is_oom or report) or errors_of(error) is not None:  # of a launcher: its ranks themselves say more
        return
    failure, place = _failure(error, is_oom=is_oom)
    if report is not None:
        try:
            write_failure(report, failure)
        except OSError as problem:
            yield f"nbguard: the report cannot be written to {report}: {problem.strerror}"
    if failure.card is None:
        return
    yield blocks_text(failure.blocks(), "python")
    if os.environ.get("GITHUB_ACTIONS"):
        yield workflow_command("error", failure.words, **place, title="nbguard")


def _failure(error: BaseException, *, is_oom: bool) -> tuple[RankFailure, dict[str, Any]]:
    """Return the failure, and the file and the line in it, where they are known."""
    found = find_in_chain(error) if is_oom else None
    raised = error if found is None else found[0]
    notebook = Notebook(shell=None, namespace=sys.modules["__main__"].__dict__, failed=error)
    card = build_card(scan(notebook).analysis) if is_oom and "torch" in sys.modules else None
    rank, world, launcher, job = place_of_process(os.environ)
    sites, place = Sites(), _users_line(raised)
    failure = RankFailure(
        rank=rank,
        world=world,
        host=socket.gethostname(),
        pid=os.getpid(),
        launcher=launcher,
        job=job,
        at=time.time() if card is None or card.asked.note is None or card.asked.note.time is None else card.asked.note.time,
        error=error_words(raised),
        place=sites.line(*place) if place else "",
        card=card,
    )
    return failure, {"file": _in_workspace(place[0]), "line": place[1]} if place else {}


def _users_line(error: BaseException) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost line of the user's that an error has passed; else of any line."""
    sites = Sites()
    lines = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if sites.is_users(line[0])), lines[-1] if lines else None)


def _in_workspace(file: str) -> str:
    """Return a file's path below the workspace of GitHub's workflow, as a mark has it."""
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    return os.path.relpath(file, workspace) if workspace and file.startswith(f"{workspace}{os.sep}") else file
