"""Processes as plain data, such as the workers behind DataLoader iterators, and other processes on the device.

A pid alone names nobody for long: each process is known by its pid and the time it started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
class Identity:
    """The identity of a process to people. A field is empty where it does not apply, or where this user may not read it."""

    user: str = ""  # name of its user, if that is another than this process's
    notebook: str = ""  # path of the notebook whose kernel it is or was started by, as the notebook was called then
    is_own: bool = False  # that is this process's notebook
    kernel: str = ""  # id of the Jupyter kernel that it is or was forked from
    program: str = ""  # what it runs, in a few words: `train.py`, `a kernel started in course`

    @property
    def short(self) -> str:
        """Return whose it is by the notebook's file name without its folder, as a panel names notebooks."""
        return basename(self.notebook) if self.notebook and not self.is_own else self.words

    @property
    def words(self) -> str:
        """Return its notebook with its path, else its program, else its user; empty where none of them is known."""
        return self._said(self.notebook)

    def name(self, folders: int = 0) -> str:
        """Return the same with the notebook's file and so many of the folders that it is in."""
        parts = self.notebook.replace("\\", "/").split("/")
        return self._said("/".join(parts[-1 - folders :]))

    def _said(self, notebook: str) -> str:
        if self.is_own:
            return "this notebook's own processes"
        what = notebook or self.program
        if self.user:
            return f"{self.user}: {what}" if what else f"processes of {self.user}"
        return what


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
    identity: Identity = field(default_factory=Identity)  # what it is to people

    @property
    def used(self) -> int | None:
        """Return the bytes of all devices that it uses together, or None where the driver does not say."""
        known = [nbytes for _, nbytes in self.devices if nbytes is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class DiagnosedProcess:
    """A process on a device, whether it is an orphan that may be ended, and why (not)."""

    found: DeviceProcess
    is_orphan: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Zombies(Result):
    """The answer of `%reset_gpu --zombies`: every process on the devices but this one, diagnosed."""

    kind: ClassVar[str] = "zombies"
    view: ClassVar[str] = "nbguard.memory.core.device_view:zombies_blocks"

    diagnosed: tuple[DiagnosedProcess, ...] = ()  # processes, each with the diagnosis and its reason
    unavailable: str = ""  # why processes could not be listed; empty if they could
    asked: bool = False  # the orphans were told to end
    ended: tuple[int, ...] = ()  # pids that ended
    remaining: tuple[tuple[int, str], ...] = ()  # (pid, why) of those that did not
    interrupted: bool = False  # by the user, in the midst of it

    @property
    def orphans(self) -> tuple[DeviceProcess, ...]:
        """Return the processes that may be ended."""
        return tuple(row.found for row in self.diagnosed if row.is_orphan)


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

_KERNEL_ID = re.compile(r"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json$")
"""The name that Jupyter's server gives a kernel's connection file: the kernel's id is in it."""

_SPAWNED = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
_KERNELS = frozenset({"ipykernel_launcher", "ipykernel", "colab_kernel_launcher"})
_CONNECTION = re.compile(r"^(?:-f=?|--f=|--connection-file=|--IPKernelApp\.connection_file=)(.+\.json)$")


@cache
def _pythons() -> re.Pattern[str]:
    """Return the beginnings of the names of such programs. Only now are the libraries' descriptions read."""
    names = ("python", "pypy", "ipython", "jupyter", "torchrun", *launchers(), "uv$", "conda", "mamba")
    return re.compile("|".join(names), re.IGNORECASE)


def is_python(program: str) -> bool:
    """Say whether the program at a path is Python or starts Python. A process whose parent is one may be no orphan."""
    return bool(_pythons().match(basename(program)))


def connection_of(command: tuple[str, ...]) -> str:
    """Return the connection file that a kernel's command names, or an empty string."""
    for place, word in enumerate(command):
        if word in ("-f", "--f", "--connection-file") and command[place + 1 : place + 2]:
            return command[place + 1] if command[place + 1].endswith(".json") else ""
        if match := _CONNECTION.match(word):
            return match[1]
    return ""


def kernel_id(command: tuple[str, ...]) -> str:
    """Return the id that Jupyter's server gave the kernel that a command starts, or an empty string."""
    named = _KERNEL_ID.search(connection_of(command))
    return "" if named is None else named[1]


def session_name(environment: Mapping[str, str]) -> str:
    """Return the notebook that Jupyter's server started a kernel with this environment for, or an empty string."""
    return environment.get("JPY_SESSION_NAME", "")


def program_words(command: tuple[str, ...], folder: str) -> str:
    """Return the program of a command line, in a few words; `folder` is where it was started, as far as that is known."""
    if not command:
        return ""
    if is_kernel(command) or kernel_id(command):
        return f"a kernel started in {basename(folder.rstrip('/')) or folder}" if folder else "a kernel"
    if not is_python(command[0]):
        return basename(command[0])
    if "-c" in command[1:9]:
        return "a multiprocessing worker" if any(map(is_spawned, command[1:9])) else f"{basename(command[0])} -c"
    return module_of(command) or basename(script_of(command)) or basename(command[0])


def is_spawned(word: str) -> bool:
    """Say whether a word is the code that `multiprocessing` gives to the Python that it starts."""
    return word.startswith(_SPAWNED)


def is_kernel(command: tuple[str, ...]) -> bool:
    """Say whether a command is the one that starts a Python kernel with a connection file."""
    return bool(command) and is_python(command[0]) and python_program(command) in _KERNELS and bool(connection_of(command))


def python_program(command: tuple[str, ...]) -> str:
    """Return the module or script that a Python command runs, without folder and suffix."""
    return module_of(command) or basename(script_of(command)).removesuffix(".py")


def module_of(command: tuple[str, ...]) -> str:
    """Return the module that a Python command runs by `-m`, or an empty string."""
    return next((word for option, word in pairwise(command[1:9]) if option == "-m"), "")


def script_of(command: tuple[str, ...]) -> str:
    """Return the first word after the program that is not an option, or an empty string."""
    return next((word for word in command[1:8] if not word.startswith("-")), "")


def basename(path: str) -> str:
    """Return the last part of a POSIX or Windows path."""
    return PureWindowsPath(path).name if "\\" in path else PurePosixPath(path).name
