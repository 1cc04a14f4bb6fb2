"""Judge whether a process on the device is an orphan: what a program that has died left behind.

Pure. To be one, everything must speak for it; whatever is not known speaks against. Never one: this process, its ancestors,
what it has started, another user's, a live kernel's, a program of its own.
"""

from __future__ import annotations

from itertools import pairwise

from nbguard.memory.command_lines import PYTHON, basename, connection_of, is_kernel, script_of
from nbguard.memory.processes import DeviceProcess, Judged, Surroundings

_REAPERS = frozenset({"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "launchd", "conmon"})
"""Programs that adopt what has lost its parent, besides pid 1."""
_SPAWNED = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
_MODULES = frozenset({"joblib.externals.loky.backend.popen_loky_posix", "torch._inductor.compile_worker"})


def _may_be_kernel(command: tuple[str, ...]) -> bool:
    """Say whether a command has anything of a kernel's: another language's, another launcher's, one under a debugger."""
    return bool(connection_of(command)) or any("kernel" in word for word in command)


def judge(found: DeviceProcess, around: Surroundings) -> Judged:
    """Return whether `found` is an orphan that may be ended, with the reason in words."""
    if against := _protected(found, around) or _has_a_parent(found):
        return Judged(found, False, against)
    if is_kernel(found.command):
        is_orphan, reason = _judge_kernel(found, around)
        return Judged(found, is_orphan, reason)
    if _may_be_kernel(found.command):
        return Judged(found, False, "perhaps a live kernel (shut it down in Jupyter)")
    if kind := _leftover_kind(found.command):
        return Judged(found, True, f"{kind} whose parent has died")
    return Judged(
        found, False, f"a program of its own without a parent (started with nohup?): `!kill {found.process.pid}` ends it"
    )


def _protected(found: DeviceProcess, around: Surroundings) -> str:
    """Return why a process must not be touched whatever else is known of it, or an empty string."""
    pid = found.process.pid
    if pid == around.pid:
        return "this kernel"
    if pid in around.ancestors:
        return "this kernel was started by it"
    if found.is_defunct:
        return "has ended already: only its entry is left"
    if found.owner is None or not around.owner or set(found.owner) != set(around.owner) or len(set(found.owner)) != 1:
        return "another user's"
    if around.pid in found.ancestors:
        return "started by this kernel (`%reset_gpu --workers` ends idle workers)"
    if found.is_elsewhere is not False:
        return "in another container, or it cannot be told whether it is"
    if not found.command:
        return "its command cannot be read"
    if not found.devices and not found.holds_files:
        return "not on a device"
    return ""


def _has_a_parent(found: DeviceProcess) -> str:
    """Return whose child a process is, if it is anybody's but an adopter's."""
    if found.is_parent_gone:
        return ""
    if found.parent_command is None or not found.parent_command or not found.ancestors:
        return "its parent cannot be read"
    program = basename(found.parent_command[0])
    runs_python = any(PYTHON.match(basename(word)) for word in found.parent_command[:3])  # a container's first process may
    if program in _REAPERS or (found.ancestors[0] == 1 and not runs_python):
        return ""
    what = "a live kernel" if is_kernel(found.command) and not found.is_forked else "its parent lives"
    return f"{what} (parent {found.ancestors[0]}, {program})"


def _judge_kernel(found: DeviceProcess, around: Surroundings) -> tuple[bool, str]:
    """Judge a process that runs a kernel's program and that nobody but an adopter is the parent of."""
    connection = connection_of(found.command)
    if found.is_forked:
        if found.is_session_leader is not False:
            return False, "a live kernel, or it cannot be told from one"
        for kernel in around.kernels:
            if kernel.connection == connection and kernel.process.started <= found.process.started:
                return False, f"of a live kernel (pid {kernel.process.pid})"
        return True, "forked by a kernel that has died"
    if found.is_forked is None or found.connection is not False:
        return False, "a live kernel: its connection file is there (shut it down in Jupyter)"
    if found.has_clients is not False:
        return False, "a live kernel: somebody is connected to it"
    return True, "a kernel whose server and connection file are gone"


def _leftover_kind(command: tuple[str, ...]) -> str:
    """Return what kind of helper a command starts, one that makes no sense without its parent; else an empty string."""
    if not command or not PYTHON.match(basename(command[0])):
        return ""
    for option, word in pairwise(command[1:9]):
        if option == "-c" and word.startswith(_SPAWNED):
            return "a multiprocessing worker"
        if option == "-m" and word in _MODULES:
            return "a worker process"
    program = script_of(command)
    return "a torch.compile worker" if program.replace("\\", "/").endswith("_inductor/compile_worker/__main__.py") else ""
