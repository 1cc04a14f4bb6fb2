"""Processes as plain data, such as the workers behind DataLoader iterators, and other processes on the device.

A pid alone names nobody for long: each process is known by its pid and the time it started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath, PureWindowsPath
from typing import ClassVar

from nbguard.libraries import launchers
from nbguard.render.result import Result


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its pid and when it started (seconds since 1970, as the system says)."""

    pid: int
    started: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersFact:
    """The worker processes of one DataLoader iterator that still run."""

    node: int | None  # the iterator's in the graph; None if the iterator is gone, and its workers were not ended
    processes: tuple[Process, ...]  # that run
    loaders: tuple[int, ...] = ()  # nodes of the DataLoaders that keep the iterator for their next epoch (persistent workers)
    yielded: int = 0  # batches that the iterator has yielded in this epoch (_num_yielded)
    is_midway: bool = False  # there are more batches to come
    is_in_use: bool = False  # more refers to it than Python shows: the `for` loop that runs over it
    private: int | None = None  # bytes of host memory that come back when the processes end; None if the system does not tell
    shared: int | None = None  # bytes of shared memory that come back then; None if the system does not tell

    @property
    def host(self) -> int | None:
        """Return the bytes of host memory that come back when the workers end; None where they are not known."""
        return None if self.private is None else self.private + (self.shared or 0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A running Jupyter kernel of this user: the process, and the connection file it was started with."""

    process: Process
    connection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts on this process and machine that other processes are diagnosed by.

    `owner` are this process's user ids (real, effective, saved; or the user's name), `kernels` the live kernels, known by
    their commands, `workers` the pids of the DataLoader workers that this process has started.
    """

    pid: int
    ancestors: frozenset[int]
    owner: tuple[str, ...]
    kernels: tuple[Kernel, ...] = ()
    workers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that uses a device, with the facts that it is diagnosed by. A field is None where the system does not tell."""

    process: Process  # pid and start
    ancestors: tuple[int, ...] = ()  # pids from its parent upwards
    owner: tuple[str, ...] | None = None  # its user ids, as in `Surroundings`
    command: tuple[str, ...] = ()  # its command line
    parent_command: tuple[str, ...] | None = None  # its parent's; None if the parent cannot be read
    is_parent_gone: bool = False  # there is no such parent, or a younger process has its pid
    is_adopted: bool | None = None  # its session shows that its parent has not started it
    is_forked: bool | None = None  # it runs the program of the process it was forked from (it never called exec)
    is_session_leader: bool | None = None  # it leads its session, as a kernel that Jupyter started does
    has_clients: bool | None = None  # somebody is connected to one of its ports; None as well where others reach it without
    connection: bool | None = None  # the connection file that its command names exists
    is_elsewhere: bool | None = None  # it runs in another container (another namespace of pids)
    is_contained: bool = False  # it runs in a container, whose first process may be any program, or that cannot be told
    is_defunct: bool = False  # it ended, and only its entry is left
    devices: tuple[tuple[str, int | None], ...] = ()  # (device, bytes) by the driver's count; None if it does not say
    holds_files: bool = False  # it has the device's files open

    @property
    def used(self) -> int | None:
        """Return the bytes of all devices that it uses together, or None where the driver does not say."""
        known = [nbytes for _, nbytes in self.devices if nbytes is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Judged:
    """A process on a device, whether it is an orphan that may be ended, and why (not)."""

    found: DeviceProcess
    is_orphan: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Zombies(Result):
    """The answer of `%reset_gpu --zombies`: every process on the devices but this one, diagnosed."""

    kind: ClassVar[str] = "zombies"
    view: ClassVar[str] = "nbguard.memory.core.views.processes:zombies_blocks"

    judged: tuple[Judged, ...] = ()  # processes, each with the diagnosis and its reason
    unavailable: str = ""  # why processes could not be listed; empty if they could
    asked: bool = False  # the orphans were told to end
    ended: tuple[int, ...] = ()  # pids that ended
    remaining: tuple[tuple[int, str], ...] = ()  # (pid, why) of those that did not
    interrupted: bool = False  # by the user, in the midst of it

    @property
    def orphans(self) -> tuple[DeviceProcess, ...]:
        """Return the processes that may be ended."""
        return tuple(row.found for row in self.judged if row.is_orphan)


def pids_text(pids: Sequence[int]) -> str:
    """Return pids in words: `pid 12`, `pids 12–15`, `pids 12, 17`."""
    numbers = sorted(pids)
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f"pid {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"pids {numbers[0]}–{numbers[-1]}"
    return f"pids {', '.join(map(str, numbers))}"


# --- command lines: the Python program that one runs, and the connection file of a kernel -----------------------------------

PYTHON = re.compile(
    "|".join(("python", "pypy", "ipython", "jupyter", "torchrun", *launchers(), "uv$", "conda", "mamba")), re.IGNORECASE
)
"""Names of programs that are Python or start Python processes themselves: such a parent may be the real one."""
_KERNELS = frozenset({"ipykernel_launcher", "ipykernel", "colab_kernel_launcher"})
_CONNECTION = re.compile(r"^(?:-f=?|--f=|--connection-file=|--IPKernelApp\.connection_file=)(.+\.json)$")


def connection_of(command: tuple[str, ...]) -> str:
    """Return the connection file that a kernel's command names, or an empty string."""
    for place, word in enumerate(command):
        if word in ("-f", "--f", "--connection-file") and command[place + 1 : place + 2]:
            return command[place + 1] if command[place + 1].endswith(".json") else ""
        if match := _CONNECTION.match(word):
            return match[1]
    return ""


def is_kernel(command: tuple[str, ...]) -> bool:
    """Say whether a command is the one that starts a Python kernel with a connection file."""
    python = bool(command) and bool(PYTHON.match(basename(command[0])))
    return python and python_program(command) in _KERNELS and bool(connection_of(command))


def python_program(command: tuple[str, ...]) -> str:
    """Return the module or script that a Python command runs, without folder and suffix."""
    for option, word in pairwise(command[1:9]):
        if option == "-m":
            return word
    return basename(script_of(command)).removesuffix(".py")


def script_of(command: tuple[str, ...]) -> str:
    """Return the first word after the program that is not an option, or an empty string."""
    return next((word for word in command[1:8] if not word.startswith("-")), "")


def basename(path: str) -> str:
    """Return the last part of a POSIX or Windows path."""
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name
