"""Other kernels on this kernel's devices, from the driver's processes and kernels' command lines."""

from __future__ import annotations

import re
from pathlib import Path

from nbguard.frontend.sidebar.protocol.state import Neighbour
from nbguard.memory.core.counters import TickReading

_CONNECTION = re.compile(rb"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")
"""The name that Jupyter's server gives a kernel's connection file: the kernel's id is in it."""
_MOST = 8


class Neighbours:
    """The processes beside this one, each with its kernel's id once it has been looked up."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._kernels: dict[int, str] = {}

    def of(self, reading: TickReading) -> tuple[Neighbour, ...]:
        """Return the other processes on the devices of a reading, the largest first.

        None where this process is not in the driver's list: in a container its pids are the host's, and mean others here.
        """
        listed: list[Neighbour] = []
        for device in reading.devices:
            processes = (None if device.nvml is None else device.nvml.processes) or ()
            if any(process.pid == reading.pid for process in processes):
                others = (process for process in processes if process.pid != reading.pid)
                listed += (Neighbour(device.device, self._kernel(each.pid), each.used) for each in others)
        return tuple(sorted(listed, key=lambda each: -(each.nbytes or 0))[:_MOST])

    def _kernel(self, pid: int) -> str:
        """Return the id of the kernel that a process is; empty where it is none, or is not this user's to look at."""
        if pid not in self._kernels:
            try:
                named = _CONNECTION.search((self._proc / str(pid) / "cmdline").read_bytes())
            except OSError:
                named = None
            self._kernels[pid] = "" if named is None else named[1].decode()
        return self._kernels[pid]
