"""List the other processes on the GPUs, and end those that a dead program left behind, by pid and start, and verified."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from dataclasses import replace

from nbguard.memory.cleanup.apply.interrupts import Interrupts
from nbguard.memory.cleanup.plan.orphans import judge
from nbguard.memory.core.processes import DeviceProcess, Process, Zombies
from nbguard.memory.scan.devices.processes import device_processes, is_alive, surroundings
from nbguard.memory.scan.workers import worker_pids

_PATIENCE = {signal.SIGTERM: 5.0, getattr(signal, "SIGKILL", signal.SIGTERM): 5.0}
"""Seconds that a process gets to end after each signal."""


def find_zombies(pids: Collection[int] = ()) -> Zombies:
    """Return the processes on the machine's GPUs (those with these pids), diagnosed; this one is left out."""
    running, reason = device_processes()
    if not running:
        return Zombies(unavailable=reason)
    around = replace(surroundings(), workers=worker_pids())
    judged = [judge(process, around) for process in running if process.process.pid != around.pid]
    judged.sort(key=lambda row: (not row.is_orphan, -(row.found.used or 0), row.found.process.pid))
    return Zombies(judged=tuple(row for row in judged if not pids or row.found.process.pid in pids), unavailable=reason)


def end_orphans(zombies: Zombies) -> Zombies:
    """End the orphans, one after the other, and return the processes, each as ended or with the reason why not.

    An interrupt stops before the next one; the result tells how far it came.
    """
    ended: list[int] = []
    remaining: list[tuple[int, str]] = []
    with Interrupts() as interrupts:
        for orphan in zombies.orphans:
            pid = orphan.process.pid
            if interrupts.happened:
                remaining.append((pid, "interrupted"))
                continue
            try:
                with interrupts.allowed():
                    reason = _end(orphan)
            except KeyboardInterrupt:
                interrupts.happened = True
                reason = "interrupted while it was being ended" if is_alive(orphan.process) else ""
            if reason:
                remaining.append((pid, reason))
            else:
                ended.append(pid)
        return replace(zombies, asked=True, ended=tuple(ended), remaining=tuple(remaining), interrupted=interrupts.happened)


def _end(orphan: DeviceProcess) -> str:
    """End one orphan; return why it is still there, or an empty string."""
    process = orphan.process
    judged = find_zombies((process.pid,)).judged  # once more: it may have changed since the list was made
    if not any(row.found.process == process and row.is_orphan for row in judged):
        return "it is no longer an orphan on a GPU" if is_alive(process) else ""
    for number, patience in _PATIENCE.items():
        if reason := _signal(process, number):
            return reason
        until = time.monotonic() + patience
        while is_alive(process) and time.monotonic() < until:
            time.sleep(0.02)
        if not is_alive(process):
            return ""
    return "it ignores even SIGKILL because it waits in the driver; only the driver or a restart of the machine ends it"


def _signal(process: Process, number: signal.Signals) -> str:
    """Send a signal to this very process and to no other that has its pid by now; return why not, if so."""
    with contextlib.ExitStack() as closing:
        handle = None
        if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(process.pid)
                closing.callback(os.close, handle)
        if not is_alive(process):  # asked with the handle open: from here on the handle means this process or nobody
            return ""
        try:
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(process.pid, number)
        except ProcessLookupError:
            return ""
        except OSError as error:
            return f"the system refuses: {error.strerror}"
    return ""
