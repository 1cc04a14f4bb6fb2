"""A plugin of pytest for nbguard as it is on Windows: `python -m pytest -p tests.as_on_windows -p tests.with_torch …`.

For nbguard's modules the modules and functions that Windows lacks are missing, and so is `/proc`. The rest of the process,
such as PyTorch and the tests, has all of Linux. Tests about permissions, signals and processes of POSIX fail then.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_POSIX = frozenset({"fcntl", "grp", "posix", "pwd", "resource", "termios", "tty"})
_LACKING = {
    "os": """fork forkpty register_at_fork getuid geteuid getgid getegid setuid getgroups getpgid getpgrp setpgid setsid killpg
        sysconf statvfs fstatvfs fchmod fchown chown lchown mkfifo mknod nice getpriority uname getloadavg ttyname ctermid
        sched_getaffinity sched_setaffinity sched_yield posix_spawn pidfd_open O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY
        O_PATH O_SYNC O_ACCMODE WNOHANG WIFEXITED WIFSIGNALED WTERMSIG waitid wait3 wait4 confstr memfd_create sendfile
        fpathconf pathconf pipe2 set_blocking readv writev posix_fadvise getxattr setxattr eventfd""",
    "signal": """SIGKILL SIGALRM SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGPIPE SIGSTOP SIGTSTP SIGCONT SIGQUIT SIGBUS SIGTRAP SIGSYS
        pthread_kill pthread_sigmask setitimer getitimer alarm pause sigwait sigwaitinfo sigtimedwait sigpending siginterrupt
        pidfd_send_signal""",
    "select": "poll epoll kqueue",
    "socket": "AF_UNIX SO_REUSEPORT",
    "time": "pthread_getcpuclockid clock_gettime clock_gettime_ns clock_settime clock_getres tzset CLOCK_MONOTONIC",
}


class _View:
    """A module without some of its names; all else is the module's own, also what is set."""

    def __init__(self, module: types.ModuleType) -> None:
        lacking = frozenset(_LACKING[module.__name__].split())
        vars(self).update(_module=module, _hidden=lacking)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_hidden"]:
            raise AttributeError(f"module {vars(self)['_module'].__name__!r} has no attribute {name!r}")
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)


_views = {name: _View(__import__(name)) for name in _LACKING}
_import, _open, _os_open = builtins.__import__, io.open, os.open


def _as_on_windows(name: str, space: Any = None, names: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if level == 0 and space is not None and str(space.get("__name__")).startswith("nbguard"):
        if name in _POSIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in _views:
            return _views[name]
    return _import(name, space, names, fromlist, level)


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, *args: Any, **keys: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith("/proc"):
            frame = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pathlib", "io", "os"):
                frame = frame.f_back  # type: ignore[assignment]
            if frame is not None and frame.f_globals.get("__name__", "").startswith("nbguard"):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
        return function(file, *args, **keys)

    return opened


builtins.__import__ = _as_on_windows
builtins.open = io.open = _without_proc(_open)  # type: ignore[assignment]
os.open = _without_proc(_os_open)
