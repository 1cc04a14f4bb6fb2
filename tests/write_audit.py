"""Watch over the tests: what nbguard itself writes, renames, removes or ends is a test's own, or the test fails.

An audit hook of Python's sees each such event in this process and in the kernels that are forked for tests. What counts is the
innermost frame that is neither Python's nor a library's: a cell of the user's and a test may write wherever they like. Nothing
of this module is imported by a kernel, which runs its source.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

REPORTS, MAY_WRITE, TEMPORARY = "NBGUARD_WRITE_REPORTS", "NBGUARD_MAY_WRITE", "NBGUARD_TEMPORARY"
"""Variables: the folder for reports, a file for each process; the tests' folder; that of temporary files, where nbguard's own
begin with its name, and libraries that it calls have theirs.
"""

_OURS = str(Path(__file__).resolve().parents[1] / "nbguard") + os.sep
_OTHERS = (*{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}, "<frozen ")  # noqa: PTH120
_LIBRARIES = f"{os.sep}site-packages{os.sep}"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAMELESS = getattr(os, "O_TMPFILE", 0)
_PLACES = {
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.truncate": ((0, -1),),
}
"""Where in the arguments of an event a path is, and the folder that it is relative to."""
_FRAMES = 12
"""Of a stack that are reported."""
_busy = threading.local()


def install() -> None:
    """Watch this process, and those that it forks, until their end: a hook cannot be taken away."""
    if os.environ.get(REPORTS):
        sys.addaudithook(_hear)


def taken() -> str:
    """Return what was reported so far, and forget it."""
    found = []
    for file in sorted(Path(os.environ[REPORTS]).iterdir()):
        found.append(file.read_text())
        file.unlink()
    return "\n".join(found)


def check() -> None:
    """Fail if anything was reported."""
    reported = taken()
    assert not reported, f"nbguard has touched what is not the test's:\n{reported}"


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        if not isinstance(arguments[2], int) or not arguments[2] & _WRITING:
            return
    elif event not in _PLACES and event not in ("os.kill", "os.killpg"):
        return
    if getattr(_busy, "is_set", False):
        return
    _busy.is_set = True
    try:
        frame, is_direct = _own_frame()
        if frame is not None and (what := _foreign(event, arguments, frame, is_direct)):
            _report(event, what)
    finally:
        _busy.is_set = False


def _own_frame() -> tuple[FrameType | None, bool]:
    """Return the innermost frame that is nobody else's, if it is nbguard's, and whether no library is in between."""
    frame: FrameType | None = sys._getframe(2)
    is_direct = True
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return frame, is_direct
        if _LIBRARIES in file:
            is_direct = False
        elif not file.startswith(_OTHERS):
            return None, False
        frame = frame.f_back
    return None, False


def _foreign(event: str, arguments: tuple[Any, ...], frame: FrameType, is_direct: bool) -> str:
    """Return what an event is about, if that is not the test's own."""
    if event.startswith("os.kill"):
        pid, number = arguments
        return "" if number == 0 or _is_descendant(pid) else f"process {pid}"
    if event == "open":
        if _NAMELESS and arguments[2] & _NAMELESS == _NAMELESS:
            return ""
        held = getattr(frame.f_locals.get("self"), "_handle", None)  # of nbguard.files.Folder: the event does not tell
        places = [_full(arguments[0], held)]
    else:
        at = [(arguments[path], arguments[folder] if folder >= 0 else None) for path, folder in _PLACES[event]]
        places = [_full(path, folder) for path, folder in at]
    return " and ".join(place for place in places if place and not _is_allowed(place, is_direct))


def _full(path: Any, folder: Any) -> str:
    """Return a path in full, the links on its way followed; nothing for a file that is open already."""
    if isinstance(path, int) or path is None:
        return ""
    name = os.fsdecode(path)
    if not os.path.isabs(name):  # noqa: PTH117
        is_held = isinstance(folder, int) and folder >= 0
        name = f"{os.readlink(f'/proc/self/fd/{folder}') if is_held else os.getcwd()}/{name}"  # noqa: PTH109, PTH115
    around, last = os.path.split(name)
    return f"{os.path.realpath(around)}/{last}"


def _is_allowed(place: str, is_direct: bool) -> bool:
    if place in ("/dev/null", "/dev/full") or "__pycache__" in place:
        return True
    if place == os.path.realpath(os.environ[TEMPORARY]):
        return True  # a file without a name, of Python's tempfile
    if any(place.startswith(f"{folder}/") for folder in os.environ[MAY_WRITE].split(os.pathsep)):
        return True
    if place.startswith(f"/dev/shm/pym-{os.getpid()}-"):
        return True  # memory that Python shares with the processes that this one forks
    if not is_direct:
        return True  # a library's: its caches, or what the user's own fit writes where nbguard stands in between
    return place.startswith(f"{os.environ[TEMPORARY]}/nbguard")


def _is_descendant(pid: int) -> bool:
    """Say whether a process is this one, or was started by it or its children; of a group, whether its leader was."""
    if not os.path.exists(f"/proc/{pid}/stat"):  # noqa: PTH110
        return True  # it has ended: nothing was done to anybody
    while pid > 0 and pid != os.getpid():
        try:
            with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid > 0


def _report(event: str, what: str) -> None:
    with open(f"{os.environ[REPORTS]}/{os.getpid()}", "a") as file:  # noqa: PTH123
        file.write(f"{event}: {what}\n{''.join(traceback.format_stack(sys._getframe(2), limit=_FRAMES))}\n")
