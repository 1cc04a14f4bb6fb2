"""Child processes with a time limit. Every look at the GPU happens in one: a context, settings and leaks end with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


_ANSWER = """
import json, os, pkgutil, sys
module, function, arguments = sys.argv[1:]
found = pkgutil.resolve_name(f"{module}:{function}")(*json.loads(arguments))
print("", json.dumps(found), sep="\\n", flush=True)
os._exit(0)  # the answer is out: how threads and the driver part is nobody's concern
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: exit status (None: the limit ended it), its output, stdout and stderr together, and seconds taken."""

    status: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Return the last line that says something."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "no output")


def run(arguments: Sequence[str], limit: float, extra: Mapping[str, str] | None = None) -> Ended:
    """Run `python *arguments` for at most `limit` seconds and return how it ended; what it started ends with it."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # nbguard need not be installed
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **(extra or {})}
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=ROOT,
        start_new_session=True,  # a group of its own, so that its DataLoader workers end too
    )
    status: int | None = None
    try:
        output, _ = child.communicate(timeout=limit)
        status = child.returncode
    except subprocess.TimeoutExpired:
        _end_group(child)
        output, _ = child.communicate()
    except BaseException:
        _end_group(child)
        raise
    return Ended(status, output, time.monotonic() - started)


def _end_group(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def with_settings(settings: str) -> dict[str, str]:
    """Return the environment in which the caching allocator has `settings` and no others: all torch know the first name."""
    return dict.fromkeys(_SETTINGS, "") | {_SETTINGS[0]: settings}


def answer(module: str, function: str, *arguments: Any, settings: str = "", limit: float = 120) -> Any:
    """Return what `module.function(*arguments)` returns in a process of its own; both ways as JSON."""
    ended = run(["-W", "ignore", "-c", _ANSWER, module, function, json.dumps(arguments)], limit, with_settings(settings))
    if ended.status != 0:
        raise AssertionError(f"{module}.{function}: {'time limit' if ended.status is None else ended.status}\n{ended.output}")
    return json.loads(ended.last_line)
