"""Processes on the GPUs and the verdict on a restart, in words and figures for text and HTML."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from nbguard.cleanup.plan.verdict import Verdict
from nbguard.memory.processes import Judged, Zombies, pids_text
from nbguard.units import format_bytes, format_column, unit_of

_LONG = 60


def zombie_rows(zombies: Zombies) -> list[tuple[str, str, str]]:
    """Return (process, bytes, judgement) for each process on the GPUs, orphans first."""
    return [(_process(each), _bytes(each), _judgement(each)) for each in zombies.judged]


def _process(each: Judged) -> str:
    found = each.found
    started = datetime.fromtimestamp(found.process.started).strftime("%Y-%m-%d %H:%M")
    command = " ".join(found.command)
    if len(command) > _LONG:
        command = command[: _LONG - 1] + "…"
    return f"pid {found.process.pid}  since {started}  {command or '(command not readable)'}"


def _bytes(each: Judged) -> str:
    if each.found.used is not None:
        return format_bytes(each.found.used)
    return "keeps the device open" if each.found.holds_files else "? (the driver does not say)"


def _judgement(each: Judged) -> str:
    return f"{'orphan' if each.is_orphan else 'left alone'}: {each.reason}"


def zombies_summary(zombies: Zombies) -> Iterator[str]:
    """Yield what is to be said of the list: what was ended, or how to end the orphans."""
    if zombies.unavailable:
        yield zombies.unavailable
    if not zombies.judged and not zombies.interrupted:
        yield "no process besides this kernel was found on a GPU"
    elif zombies.judged and not zombies.orphans:
        yield "no orphan of yours among the processes on the GPUs: there is nothing to end"
    elif zombies.orphans and not zombies.asked:
        pids = [found.process.pid for found in zombies.orphans]
        s = "s" if len(pids) > 1 else ""
        known = [found.used for found in zombies.orphans if found.used is not None]
        back = f", {format_bytes(sum(known))} of device memory" if known else ""
        yield f"{len(pids)} orphan{s} ({pids_text(pids)}{back}): `%reset_gpu --zombies --yes` ends {'them' if s else 'it'}"
    if zombies.ended:
        yield f"ended and gone: {pids_text(zombies.ended)}"
    for pid, reason in zombies.remaining:
        yield f"still there: pid {pid}: {reason}"
    if zombies.interrupted:
        yield "interrupted: run %reset_gpu --zombies to see what is left"


def verdict_rows(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return (what, bytes, how it comes back) for each part of what the kernel still takes; the figures re-add."""
    figures = format_column([part.nbytes for part in verdict.rest], unit_of(verdict.total))
    rows = zip(verdict.rest, figures, strict=True)
    return [(part.name, figure, f"{part.note}{' (a restart only)' if part.needs_restart else ''}") for part, figure in rows]


def verdict_head(verdict: Verdict) -> str:
    """Return the line above the parts."""
    return f"this kernel still takes {format_bytes(verdict.total)}:"
