"""The verdict after the hardest cleanup on the memory still taken and on a restart of the kernel. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.breakdown import NOT_OURS, DevicePart, parts_of
from nbguard.memory.core.facts import Facts, HolderSource
from nbguard.memory.core.references.graph import STALE_KINDS
from nbguard.memory.core.references.holders import Holder, unheld
from nbguard.units import MiB, counted, format_bytes

_WORTH_A_RESTART = 64 * MiB
_SHARE = 0.01
"""A restart is worth it from so many bytes, and this share of the device, that nothing else gives back besides the context."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A part of the memory that the kernel still takes. `needs_restart`: no command gives it back."""

    name: str
    nbytes: int
    note: str
    needs_restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The memory that this kernel still takes of the devices, and the effect of a restart. All sizes are bytes."""

    rest: tuple[Rest, ...]  # parts that add up to `total`
    total: int  # bytes that this kernel takes of the devices
    gain: int  # bytes that only a restart gives back, the context's included
    is_needed: bool  # a restart is worth it, or CUDA answers nothing else
    loses: int  # number of names that lead to memory and that a restart loses
    reason: str  # all of it in a sentence


_NOTES = {
    "your names": advice.PLACEHOLDER.code + " or " + advice.EVERYTHING.code + " frees it",
    "running code": "freed when it ends",
    "kept results": "displayed results and copies that are kept: " + advice.REPORT.command + " names each",
    "libraries": "none of your names leads to it",
    "cuBLAS workspaces": "cleared by " + advice.HARD.code + " when nothing runs and no CUDA graph is there",
    "CUDA graphs": "of graph pools that no Python object holds",
    "not held by Python": "buffers and caches of C++ libraries",
    "free, but not returnable": "freed with its neighbouring blocks, or with its pool's CUDA graph",
    "context": "CUDA itself in this kernel",
}
_CLASSES: dict[HolderSource, str] = {"workspaces": "cuBLAS workspaces", "graphs": "CUDA graphs"}
_RESTART = ("libraries", "CUDA graphs", "not held by Python", "context")


def verdict(analysis: Analysis, broken: str = "") -> Verdict:
    """Return the verdict on a scan; `broken` is the error that CUDA answers every call with, if it does."""
    facts = analysis.facts
    sums: dict[str, int] = {}
    for device in analysis.devices:
        for name, nbytes in _parts(device):
            sums[name] = sums.get(name, 0) + nbytes
    rest = tuple(Rest(name, sums[name], _NOTES[name], name in _RESTART) for name in _NOTES if sums.get(name))
    total = sum(part.nbytes for part in rest)
    gain = sum(part.nbytes for part in rest if part.needs_restart)
    beside_context = gain - sums.get("context", 0)
    size = sum(device.total or 0 for device in facts.devices)
    is_needed = bool(broken) or beside_context >= max(_WORTH_A_RESTART, _SHARE * size)
    names = sum(root.kind in ("name", "module") for root in facts.graph.roots)
    return Verdict(
        rest=rest,
        total=total,
        gain=gain,
        is_needed=is_needed,
        loses=names,
        reason=_reason(rest, gain, is_needed, names, broken),
    )


def _parts(device: DeviceAnalysis) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of each part of a device that this kernel takes, as in the report's bar and table."""
    facts = device.analysis.facts
    rows = (*(holder for holder, _ in device.holdings), *unheld(facts, device.facts))
    for row in rows:
        yield _class_of(facts, row), row.retained
    for part in parts_of(device.facts, sum(row.retained for row in rows), facts.pid, device.analysis.pools_in_use):
        if part.name == DevicePart.CONTEXT:
            yield "context", part.nbytes
        elif part.name != DevicePart.ALLOCATED and part.name not in NOT_OURS:
            yield "free, but not returnable", part.nbytes


def _class_of(facts: Facts, row: Holder) -> str:
    if row.source != "python":
        return _CLASSES.get(row.source, "not held by Python")
    kinds = {facts.graph.roots[root].kind for root in row.roots}
    if kinds & {"name", "module"}:
        return "your names"
    if "frame" in kinds:
        return "running code"
    return "kept results" if kinds & STALE_KINDS else "libraries"


def _reason(rest: tuple[Rest, ...], gain: int, is_needed: bool, names: int, broken: str) -> str:
    what = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in rest if part.needs_restart)
    leading = counted(names, "name that leads", "names that lead")
    loses = f"it loses every variable, {leading} to memory among them"
    if broken:
        return f"a restart of the kernel is needed because CUDA answers every call with an error ({broken}); {loses}"
    if not gain:
        return "a restart of the kernel is not needed, because commands give everything back"
    if is_needed:
        return f"only a restart of the kernel gives back {format_bytes(gain)} more ({what}); {loses}"
    return f"a restart of the kernel is not needed, because it would give back only {format_bytes(gain)} ({what})"
