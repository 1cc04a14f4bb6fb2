"""Processes as the system shows them, read by psutil, with memory, start, owner, parents, and the devices they use.

Linux tells more than psutil knows of, read from /proc: whether a process was forked and never called exec, its namespace,
the shared memory it keeps for others. Unreadable facts are None.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

try:
    import psutil
except ImportError:  # there are no wheels of it for this platform (Pyodide): then no process is known
    psutil = None

from nbguard.memory.core.facts import NvmlFacts
from nbguard.memory.core.processes import (
    DeviceProcess,
    Identity,
    Kernel,
    Process,
    Surroundings,
    connection_of,
    is_kernel,
    is_python,
    kernel_id,
    program_words,
    session_name,
)
from nbguard.memory.scan.devices.nvml import NvmlReader

Answer = TypeVar("Answer")

_NO_PSUTIL = "psutil is not installed, so processes are not known (pip install psutil)"
_REFUSALS: tuple[type[Exception], ...] = (OSError, ValueError, NotImplementedError)
if psutil is not None:
    _REFUSALS += (psutil.Error,)

_PROC = Path("/proc")
_FORKED = 0x40  # PF_FORKNOEXEC, field 9 of /proc/PID/stat
_FIRST_NAMESPACE = 4026531836  # PROC_PID_INIT_INO: the machine's own namespace of pids
_DEVICE = re.compile(r"^/dev/nvidia\d+$")
_MEMORY = "/dev/nvidia-uvm"
"""Opened by every CUDA context, but not by programs that only read the driver's counters."""


def _ask(question: Callable[[], Answer]) -> Answer | None:
    """Return the answer, or None where the process is gone or the system does not tell."""
    try:
        return question()
    except _REFUSALS:
        return None


def _entry(pid: int) -> Any:
    """Return psutil's view of a process; None if there is none, or no psutil."""
    return None if psutil is None else _ask(lambda: psutil.Process(pid))


def process_of(pid: int) -> Process | None:
    """Return the process that has `pid` now; None if there is none, or only the entry of one that ended."""
    entry = _entry(pid)
    if entry is None or _ask(entry.status) in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return None
    started = _ask(entry.create_time)
    return None if started is None else Process(pid, started)


def is_alive(process: Process) -> bool:
    """Say whether this very process still runs: not one that has its pid by now, and not one that ended."""
    return process_of(process.pid) == process


def is_child(process: Process) -> bool:
    """Say whether this very process still runs and was started by this one."""
    return is_alive(process) and _ask(psutil.Process(process.pid).ppid) == os.getpid()


def is_listed(process: Process) -> bool:
    """Say whether the system still has an entry for this very process, be it one that ended and was not asked for."""
    entry = _entry(process.pid)
    return entry is not None and _ask(entry.create_time) == process.started


def private_bytes(pid: int) -> int | None:
    """Return the bytes of memory that come back when this process ends: those it shares with no other."""
    entry = _entry(pid)
    nbytes = None if entry is None else _ask(lambda: entry.memory_full_info().uss)
    return None if nbytes is None else int(nbytes)


def shared_bytes(pid: int) -> int | None:
    """Return the bytes of the shared memory files of torch that this process has made and keeps open for others (Linux)."""
    sizes: dict[tuple[int, int], int] = {}
    for name, at in _open_files(pid):
        if f"torch_{pid}_" in name:
            file = _ask(at.stat)
            if file is not None:
                sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(sizes.values()) if _PROC.joinpath(str(pid), "fd").exists() else None


def _open_files(pid: int) -> Iterator[tuple[str, Path]]:
    """Yield (its target, its entry) of each open file of a process, as far as this user may see them."""
    folder = _PROC / str(pid) / "fd"
    for entry in _ask(lambda: list(folder.iterdir())) or ():
        name = _ask(entry.readlink)
        if name is not None:
            yield str(name), entry


# --- processes on a device --------------------------------------------------------------------------------------------------


def surroundings() -> Surroundings:
    """Return the facts on this process and on the kernels that run here that other processes are diagnosed by."""
    me = psutil.Process()
    ancestors = frozenset(parent.pid for parent in _ask(me.parents) or ())
    kernels = []
    for other in psutil.process_iter():
        command = tuple(_ask(other.cmdline) or ())
        if is_kernel(command) and _is_forked(other.pid) is not True and (kernel := process_of(other.pid)) is not None:
            kernels.append(Kernel(kernel, connection_of(command)))
    return Surroundings(pid=me.pid, ancestors=ancestors, owner=_owner(me) or (), kernels=tuple(kernels))


def device_processes() -> tuple[tuple[DeviceProcess, ...], str]:
    """Return the processes on the machine's GPUs, and why the driver's list could not be used, if so.

    The driver's list counts only where it speaks of the pids that are seen here: in a container it may speak of the host's.
    Own processes that have a device's files open are on it whatever the list says: a forked worker keeps the memory of a
    kernel that died without being listed.
    """
    if psutil is None:
        return (), _NO_PSUTIL
    with NvmlReader() as nvml:
        everybody = nvml.everybody()
        reason = nvml.reason or ""
    holding = {other.pid for other in psutil.process_iter() if _holds_device_files(other.pid)}
    listed = {pid: everybody[pid] for pid in _seen_here(everybody)}
    if len(listed) < len(everybody):
        reason = "the driver lists processes by pids of another namespace (a container's host): they are not diagnosed"
    processes = (process_facts(pid, tuple(listed.get(pid, ())), pid in holding) for pid in sorted({*listed, *holding}))
    return tuple(process for process in processes if process is not None), reason


def identified(driver: NvmlFacts | None) -> NvmlFacts | None:
    """Return the driver's readings of a device with the identity of each process but this one, as far as it can be known."""
    if driver is None or not driver.processes or psutil is None:
        return driver
    others = _seen_here({process.pid for process in driver.processes}) - {os.getpid()}
    known = (replace(each, identity=identity_of(each.pid)) if each.pid in others else each for each in driver.processes)
    return replace(driver, processes=tuple(known))


def identity_of(pid: int) -> Identity | None:
    """Return the identity of the process with this pid; None if there is none."""
    entry = _entry(pid)
    started = None if entry is None else _ask(entry.create_time)
    return None if started is None else _identity(Process(pid, started))


@lru_cache(256)
def _identity(process: Process) -> Identity:
    entry = _entry(process.pid)
    if entry is None:
        return Identity()
    command = tuple(_ask(entry.cmdline) or ())
    notebook = session_name(_ask(entry.environ) or {})
    return Identity(
        user="" if _owner(entry) == _owner(psutil.Process()) else str(_ask(entry.username) or "another user"),
        notebook=notebook,
        is_own=bool(notebook) and notebook == session_name(os.environ),
        kernel=kernel_id(command),
        program=program_words(command, _ask(entry.cwd) or ""),
    )


def _seen_here(listed: Collection[int]) -> set[int]:
    """Return the listed pids that are known to be pids of this namespace.

    In the machine's own namespace all of them; in another those that are seen to have the device open. Where there are no
    such files (WSL) the list is believed if this process is on it.
    """
    if not _is_contained():
        return set(listed)
    if Path(_MEMORY).exists():
        return {pid for pid in listed if _holds_device_files(pid)}
    return set(listed) if os.getpid() in listed else set()


def _holds_device_files(pid: int) -> bool:
    """Say whether a process is seen to have a GPU and CUDA's memory device open (Linux)."""
    names = {name for name, _ in _open_files(pid)}
    return _MEMORY in names and any(map(_DEVICE.match, names))


def process_facts(
    pid: int, devices: tuple[tuple[str, int | None], ...] = (), holds_files: bool = False
) -> DeviceProcess | None:
    """Return the facts on a process that it is diagnosed by, or None if it ended."""
    entry = _entry(pid)
    started = None if entry is None else _ask(entry.create_time)
    if entry is None or started is None:
        return None
    command = tuple(_ask(entry.cmdline) or ())
    parents = _ask(entry.parents)
    return DeviceProcess(
        process=Process(pid, started),
        ancestors=tuple(parent.pid for parent in parents or ()),
        owner=_owner(entry),
        command=command,
        parent_command=None if not parents else tuple(_ask(parents[0].cmdline) or ()),
        is_parent_gone=parents is not None and not parents and _is_gone(_ask(entry.ppid) or 0),
        is_adopted=_is_adopted(pid, parents[0]) if parents else None,
        is_forked=_is_forked(pid),
        is_session_leader=None if (session := _session(pid)) is None else session == pid,
        has_clients=_has_clients(entry),
        connection=_has_connection_file(entry, command),
        is_elsewhere=_is_elsewhere(pid),
        is_contained=_is_contained(),
        is_defunct=_ask(entry.status) in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD),
        devices=devices,
        holds_files=holds_files,
        identity=_identity(Process(pid, started)),
    )


def _owner(process: Any) -> tuple[str, ...] | None:
    """Return a process's user ids: real, effective and saved; its user's name where the system has none."""
    if not hasattr(process, "uids"):
        name = _ask(process.username)
        return None if name is None else (str(name),)
    ids = _ask(process.uids)
    return None if ids is None else tuple(map(str, ids))


def _is_gone(pid: int) -> bool:
    """Say whether a process lost its parent: its number belongs to no process, or to one younger than the child.

    A process may be there without being shown to this user.
    """
    return bool(pid) and (_entry(pid) is not None or _session(pid) is None)


def _is_adopted(pid: int, parent: Any) -> bool | None:
    """Say whether the session of a process shows that its parent has not started it.

    A child is in its parent's session or leads one of its own. A parent that leads one may have left another before, as
    Python programs can.
    """
    own, its = _session(pid), _session(parent.pid)
    if own is None or its is None:
        return None
    if own in (pid, its):
        return False
    program = _ask(parent.exe)
    may_be_python = not program or is_python(program)
    return None if parent.pid != 1 and its == parent.pid and may_be_python else True


def _session(pid: int) -> int | None:
    return _ask(lambda: os.getsid(pid)) if hasattr(os, "getsid") else None


def _is_forked(pid: int) -> bool | None:
    text = _ask(_PROC.joinpath(str(pid), "stat").read_text)
    return None if text is None else bool(int(text.rpartition(")")[2].split()[6]) & _FORKED)


def _has_namespaces() -> bool:
    return _PROC.joinpath("self", "ns").exists()


def _is_contained() -> bool:
    """Say whether this process is in another namespace of pids than the machine's own, or that cannot be told."""
    return _has_namespaces() and _ask(lambda: (_PROC / "self/ns/pid").stat().st_ino) != _FIRST_NAMESPACE


def _is_elsewhere(pid: int) -> bool | None:
    """Say whether a process is in another namespace of pids; where the system has none, it is not."""
    if not _has_namespaces():
        return False
    ours = _ask(lambda: (_PROC / "self/ns/pid").stat().st_ino)
    its = _ask(lambda: (_PROC / str(pid) / "ns/pid").stat().st_ino)
    return None if ours is None or its is None else ours != its


def _has_clients(process: Any) -> bool | None:
    """Say whether another process is connected to one by the network; None where there may be others.

    Of sockets that are files, as a kernel has them with the transport `ipc`, the system does not show who is connected.
    """
    ask = getattr(process, "net_connections", None) or process.connections  # the older name, until psutil 6
    connections = _ask(lambda: ask(kind="all"))
    if connections is None:
        return None
    linked = {(each.laddr, each.raddr) for each in connections if each.status == psutil.CONN_ESTABLISHED}
    if any((raddr, laddr) not in linked for laddr, raddr in linked):  # ipykernel is connected to itself
        return True
    is_heard = any(connection.status == psutil.CONN_LISTEN for connection in connections)
    is_a_file = any(type(connection.laddr) is str and connection.laddr for connection in connections)
    return False if is_heard and not is_a_file else None


def _has_connection_file(process: Any, command: tuple[str, ...]) -> bool | None:
    """Say whether the connection file that a kernel was started with is there; None where that cannot be told.

    It is looked for where the process sees it: in its own root.
    """
    name = connection_of(command)
    if not name or not Path(name).is_absolute():
        return None
    root = _PROC / str(process.pid) / "root"
    with contextlib.suppress(OSError):
        return (root / name.lstrip("/")).exists() if root.exists() else Path(name).exists()
    return None
