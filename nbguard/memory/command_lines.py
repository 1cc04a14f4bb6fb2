"""Command lines of processes: the Python program that one runs, and the connection file of a kernel."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import PurePosixPath, PureWindowsPath

PYTHON = re.compile(r"(python|pypy|ipython|jupyter|torchrun|accelerate|uv$|conda|mamba)", re.IGNORECASE)
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
