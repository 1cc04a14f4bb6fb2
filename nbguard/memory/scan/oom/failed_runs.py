"""Runs of cells that ran out of memory, and the memory that an earlier run of the same source had taken and needed."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core.oom_facts import AllocatorCounts, EarlierFailure, OomNote
from nbguard.memory.scan.heap.kinds import Types, mro_of, namespace_of
from nbguard.memory.scan.oom.cell_start import ATOMS, CellStart, start_of
from nbguard.memory.scan.oom.names import Names, made_by, reached_by
from nbguard.memory.scan.oom.notes import NOTES

_KEPT = 64
_CONSTANT = Types((types.FunctionType, types.BuiltinFunctionType, types.ModuleType))
"""Types of values that are assumed constant as long as a name leads to the same one."""
_OF_A_CLASS = Types((types.FunctionType, types.GetSetDescriptorType, classmethod, staticmethod, property))
"""Types of values in the namespace of a class that do not change by themselves."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """A run of a cell that ran out of a device's memory. Numbers and names only: it keeps nothing of the user's alive."""

    start: CellStart  # the state at its beginning
    note: OomNote  # the allocator at the failure
    constants: dict[str, int]  # for each name whose value cannot have changed inside: a hash of its value
    needed: int | None = None  # bytes that it needed at the same time, at least, as its card says; None if unknown


_RUNS: deque[FailedRun] = deque(maxlen=_KEPT)


def keep_run(cell: int, namespace: dict[str, Any]) -> None:
    """Keep that cell number `cell`, which has just ended, ran out of a device's memory."""
    start = start_of(cell)
    note = next((note for note in reversed(tuple(NOTES)) if note.cell == cell), None)
    if start is not None and note is not None and note.counts is not None:
        there = {name: value for name, value in namespace.items() if start.names.get(name) == id(value)}
        hashes = {name: hash_of(value) for name, value in there.items()}
        constants = {name: value for name, value in hashes.items() if value is not None}
        _RUNS.append(FailedRun(start=start, note=note, constants=constants))


def keep_need(cell: int | None, needed: int | None) -> None:
    """Keep the bytes that the last failed run needed at the same time, at least, if it was that of cell number `cell`."""
    if _RUNS and _RUNS[-1].start.cell == cell:
        _RUNS[-1] = replace(_RUNS[-1], needed=needed)


def forget_runs() -> None:
    """Keep no failed run any more."""
    _RUNS.clear()


def earlier_failures(
    cell: int, device: str, namespace: dict[str, Any], inputs: Sequence[str], global_names: Names | None
) -> Iterator[EarlierFailure]:
    """Yield the runs before cell number `cell` of the same source that ran out of memory of the same device.

    `global_names`: those of the notebook's functions (`names_of_functions`).
    """
    runs = [run for run in _RUNS if run.start.cell < cell and run.note.device == device]
    runs = [run for run in runs if inputs[run.start.cell] == inputs[cell]]
    now = next((run for run in reversed(_RUNS) if run.start.cell == cell), None)
    read = _inputs_of(inputs[cell], namespace, global_names) if runs and now is not None else None
    for run in runs:
        before, counts = run.start.devices.get(device, AllocatorCounts()), run.note.counts or AllocatorCounts()
        yield EarlierFailure(
            cell=run.start.cell,
            requested=run.note.requested,
            taken=max(0, run.note.allocated - before.allocated),
            made=max(0, counts.made - before.made),
            made_blocks=max(0, counts.made_blocks - before.made_blocks),
            peak=max(run.note.allocated, run.note.peak_allocated or 0),
            needed=run.needed,
            is_of_same_inputs=read is not None and now is not None and _is_same(read, run, now),
        )


def _inputs_of(source: str, namespace: dict[str, Any], global_names: Names | None) -> set[str] | None:
    """Return the names that a cell may reach and does not make itself before, or None if it may be any name."""
    reached = reached_by(source, namespace, global_names)
    return None if reached is None else reached - made_by(source, sys.maxsize, global_names)


def _is_same(read: set[str], one: FailedRun, other: FailedRun) -> bool:
    there = read & (one.start.names.keys() | other.start.names.keys())
    return all(name in one.constants and one.constants[name] == other.constants.get(name) for name in there)


def hash_of(value: object) -> int | None:
    """Return a hash of a number, string, function, module or class, or None if it may change inside."""
    kind = type(value)
    if id(kind) in ATOMS:
        return hash((id(kind), value))
    if kind in _CONSTANT:
        return id(value)
    if type not in mro_of(kind):
        return None
    inside = namespace_of(value)  # type: ignore[arg-type]
    module = inside.get("__module__")
    if type(module) is str and module != "__main__":
        return id(value)
    hashes = [(name, _hash_in_class(name, held)) for name, held in inside.items()]
    return None if any(hashed is None for _, hashed in hashes) else hash((id(value), *hashes))


def _hash_in_class(name: str, value: object) -> int | None:
    if id(type(value)) in ATOMS:
        return hash((id(type(value)), value))
    return id(value) if type(value) in _OF_A_CLASS or name in ("__annotations__", "__annotations_cache__") else None
