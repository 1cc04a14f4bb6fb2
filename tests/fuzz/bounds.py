"""Bounds on what a process does with files of strangers: processor time and memory; nothing is run, or written elsewhere."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbguard

SECONDS = 20
"""Processor time that one file may take: the faults that were found took more than twice that, what is right a hundredth."""
MEMORY = 1 << 30
"""Bytes of address space that the process may have."""

_RUNS = frozenset({"os.system", "os.exec", "os.spawn", "os.fork", "pickle.find_class", "socket.connect"})
_STARTS = frozenset({"subprocess.Popen", "os.posix_spawn"})  # since Python 3.13 the former does the latter
_CHANGES = frozenset({"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"})
_STEERS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that steer a terminal or the reading direction, or that cannot be written."""
_READER = [sys.executable, "-I", "-S", "-c"]
"""The process in which nbguard reads large pickles."""


def bound_memory() -> None:
    """Bound the memory of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))


def bound_time() -> None:
    """Let this process take SECONDS of processor time from here on; the system ends it then."""
    used = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (round(used) + SECONDS, resource.RLIM_INFINITY))


def watched(folder: Path) -> list[str]:
    """Watch what this process does from now on; return the list to which it is added what it may not do.

    It may write below `folder` and to the folder for temporary files, and start the process that reads large pickles.
    """
    done: list[str] = []
    allowed = tuple(str(place.resolve()) for place in (folder, Path(tempfile.gettempdir())))

    def is_elsewhere(path: object) -> bool:
        if not isinstance(path, (str, bytes)):
            return False  # a descriptor
        text = path.decode(errors="replace") if isinstance(path, bytes) else path
        return text != "/dev/null" and not str(Path(text).absolute()).startswith(allowed)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        is_wrong = event in _RUNS
        if event in _STARTS:
            is_wrong = list(arguments[1])[: len(_READER)] != _READER
        elif event == "open":
            is_wrong = isinstance(arguments[1], str) and bool(set("wax+") & set(arguments[1])) and is_elsewhere(arguments[0])
        elif event in _CHANGES:
            is_wrong = is_elsewhere(arguments[0])
        if is_wrong:
            done.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    return done


def in_bounds(module: str, *arguments: str) -> str:
    """Run a module in a process of its own that bounds itself, and return what it prints; AssertionError where it fails."""
    root = Path(nbguard.__file__).parents[1]
    command = [sys.executable, "-B", "-m", module, *arguments]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    assert run.returncode == 0, f"it ended with {run.returncode}:\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
    return run.stdout


def complaints(texts: Sequence[str]) -> list[str]:
    """Return the texts that a terminal should not be given."""
    return [text[:200] for text in texts if any(unicodedata.category(each) in _STEERS and each not in "\n\t" for each in text)]


def unescaped(pages: Sequence[str]) -> list[str]:
    """Return the HTML into which a text has come as it was."""
    return [page for page in pages if "<img" in page or "onerror=alert(1)>" in page]
