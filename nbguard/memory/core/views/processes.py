"""Processes on the GPUs as blocks, each with its diagnosis, and how to end the orphans."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from nbguard.memory.core import advice
from nbguard.memory.core.processes import DeviceProcess, Judged, Zombies, basename, connection_of, pids_text
from nbguard.render.blocks import Block, Line, Table, TableRow
from nbguard.units import counted, format_bytes


def zombies_blocks(zombies: Zombies) -> Iterator[Block]:
    """Yield the processes on the GPUs, orphans first, then the sentences on them."""
    if zombies.judged:
        yield Table(rows=tuple(map(process_row, zombies.judged)), figures=(3,))
    yield from map(Line, _sentences(zombies))


def process_row(judged: Judged) -> TableRow:
    """Return a process with its diagnosis as a row."""
    process = judged.found
    started = datetime.fromtimestamp(process.process.started).strftime("%Y-%m-%d %H:%M")
    judgement = f"{'orphan' if judged.is_orphan else 'left alone'}: {judged.reason}"
    return TableRow(cells=(f"pid {process.process.pid}", f"since {started}", who(process), _bytes(judged), judgement))


def who(process: DeviceProcess) -> str:
    """Return whose a process is: the notebook of a kernel, else the command; the user in front where it is another one.

    A cell that is too narrow loses its end: the notebook's folder stands behind its name.
    """
    path = process.identity.notebook if connection_of(process.command) else ""
    name = basename(path)
    folder = path.removesuffix(name).rstrip("/\\")
    words = f"{name} in {folder}" if folder else name or " ".join(process.command) or "(command not readable)"
    return f"{process.identity.user}: {words}" if process.identity.user else words


def _bytes(judged: Judged) -> str:
    if judged.found.used is not None:
        return format_bytes(judged.found.used)
    return "keeps the device open" if judged.found.holds_files else "? (the driver does not say)"


def _sentences(zombies: Zombies) -> Iterator[str]:
    """Yield sentences on the ended processes, or on how to end the orphans."""
    if zombies.unavailable:
        yield zombies.unavailable
    if not zombies.judged and not zombies.interrupted:
        yield "no process other than this kernel was found on a GPU"
    elif zombies.judged and not zombies.orphans:
        yield "no orphan of yours among the processes on the GPUs: there is nothing to end"
    elif zombies.orphans and not zombies.asked:
        pids = [orphan.process.pid for orphan in zombies.orphans]
        known = [orphan.used for orphan in zombies.orphans if orphan.used is not None]
        back = f", {format_bytes(sum(known))} of device memory" if known else ""
        them = "them" if len(pids) > 1 else "it"
        yield f"{counted(len(pids), 'orphan')} ({pids_text(pids)}{back}): " + advice.END_ZOMBIES.code + f" ends {them}"
    if zombies.ended:
        yield f"ended and gone: {pids_text(zombies.ended)}"
    for pid, reason in zombies.remaining:
        yield f"still there: pid {pid}: {reason}"
    if zombies.interrupted:
        yield "interrupted: run " + advice.ZOMBIES.command + " to see what is left"
