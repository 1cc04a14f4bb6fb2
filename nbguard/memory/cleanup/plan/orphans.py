"""The diagnosis of a process on the device, which tells whether it is an orphan of a program that died.

A process is an orphan only if every fact says so, and an unknown fact speaks against it. This process, its ancestors and
children, another user's process, a live kernel's and a program of its own never are. A name speaks against an orphan at most,
as anybody may give a program any name. Pure.
"""

from __future__ import annotations

from itertools import pairwise

from nbguard.memory.core import advice
from nbguard.memory.core.processes import (
    DeviceProcess,
    DiagnosedProcess,
    Surroundings,
    basename,
    connection_of,
    is_kernel,
    is_python,
    is_spawned,
    script_of,
)

_INITS = frozenset({"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "launchd", "conmon"})
"""Programs that start no workers of Python's. Another one as the machine's first process may have started them itself."""
_JOBLIB = "joblib.externals.loky.backend.popen_loky_posix"
_MODULES = frozenset({_JOBLIB, "torch._inductor.compile_worker"})


def _may_be_kernel(command: tuple[str, ...]) -> bool:
    """Say whether a command has anything of a kernel's: another language's, another launcher's, one under a debugger."""
    return bool(connection_of(command)) or any("kernel" in word for word in command)


def diagnose(candidate: DeviceProcess, around: Surroundings) -> DiagnosedProcess:
    """Return whether `found` is an orphan that may be ended, with the reason in words."""
    if against := _protected(candidate, around) or _has_a_parent(candidate):
        return DiagnosedProcess(candidate, False, against)
    if is_kernel(candidate.command):
        is_orphan, reason = _diagnose_kernel(candidate, around)
        return DiagnosedProcess(candidate, is_orphan, reason)
    if _may_be_kernel(candidate.command):
        return DiagnosedProcess(candidate, False, "perhaps a live kernel (shut it down in Jupyter)")
    if kind := _leftover_kind(candidate.command):
        return DiagnosedProcess(candidate, True, f"{kind} whose parent died")
    return DiagnosedProcess(
        candidate,
        False,
        f"a program of its own without a parent (started with nohup?): `!kill {candidate.process.pid}` ends it",
    )


def _protected(candidate: DeviceProcess, around: Surroundings) -> str:
    """Return why a process must not be touched whatever else is known of it, or an empty string."""
    pid = candidate.process.pid
    if pid == around.pid:
        return "this kernel"
    if pid in around.ancestors:
        return "this kernel was started by it"
    if candidate.is_defunct:
        return "has ended already: only its entry is left"
    if (
        candidate.owner is None
        or not around.owner
        or set(candidate.owner) != set(around.owner)
        or len(set(candidate.owner)) != 1
    ):
        return "another user's"
    if around.pid in candidate.ancestors:
        return f"started by this kernel: {_how_it_ends(candidate, around)}"
    if candidate.is_elsewhere is not False:
        return "in another container, or it cannot be told whether it is"
    if not candidate.command:
        return "its command cannot be read"
    if not candidate.devices and not candidate.holds_files:
        return "not on a device"
    return ""


def _how_it_ends(candidate: DeviceProcess, around: Surroundings) -> str:
    """Return in words the kind of a process that this kernel started, and the way to end it."""
    if candidate.process.pid in around.workers:
        return "a DataLoader's worker (" + advice.end_workers().code + " ends it when it is idle)"
    if _JOBLIB in candidate.command:
        return "joblib's worker (" + advice.end_joblib_workers().code + " ends it)"
    return "an executor's `shutdown()` ends its workers, a pool's `terminate()`"


def _has_a_parent(candidate: DeviceProcess) -> str:
    """Return whose child a process is, if it is anybody's but an adopter's."""
    if candidate.is_parent_gone:
        return ""
    if candidate.parent_command is None or not candidate.parent_command or not candidate.ancestors:
        return "its parent cannot be read"
    if candidate.is_adopted:
        return ""
    program = basename(candidate.parent_command[0])
    if candidate.ancestors[0] == 1 and program in _INITS:
        return f"this container's first process ({program}) may have started it" if candidate.is_contained else ""
    what = "a live kernel" if is_kernel(candidate.command) and not candidate.is_forked else "its parent lives"
    return f"{what} (parent {candidate.ancestors[0]}, {program})"


def _diagnose_kernel(candidate: DeviceProcess, around: Surroundings) -> tuple[bool, str]:
    """Diagnose a process that runs a kernel's program and that nobody but an adopter is the parent of."""
    connection = connection_of(candidate.command)
    if candidate.is_forked:
        if candidate.is_session_leader is not False:
            return False, "a live kernel, or it cannot be told from one"
        for kernel in around.kernels:
            if kernel.connection == connection and kernel.process.started <= candidate.process.started:
                return False, f"of a live kernel (pid {kernel.process.pid})"
        return True, "forked by a dead kernel"
    if candidate.is_forked is None or candidate.connection is not False:
        return False, "a live kernel: its connection file is there (shut it down in Jupyter)"
    if candidate.has_clients is not False:
        return False, "a live kernel: somebody is connected to it"
    return True, "a kernel whose server and connection file are gone"


def _leftover_kind(command: tuple[str, ...]) -> str:
    """Return in words the helper that a command starts, if it makes no sense without its parent; else an empty string."""
    if not command or not is_python(command[0]):
        return ""
    for option, word in pairwise(command[1:9]):
        if option == "-c" and is_spawned(word):
            return "a multiprocessing worker"
        if option == "-m" and word in _MODULES:
            return "a worker process"
    program = script_of(command)
    return "a torch.compile worker" if program.replace("\\", "/").endswith("_inductor/compile_worker/__main__.py") else ""
