"""Runs of cells that failed, with the counters at their start, and the names that cells bound otherwise than they say."""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nbguard.cell_names import cell_names
from nbguard.memory.core.oom_facts import AllocatorCounts, EarlierFailure, Growing, OomFact, OomNote
from nbguard.memory.scan.devices.cuda import nested_stats
from nbguard.memory.scan.heap.kinds import Types, mro_of, namespace_of
from nbguard.memory.scan.oom.chain import NOTES
from nbguard.memory.scan.oom.names import Names, made_by, reached_by

# --- The allocators' counters and the ids of the names at a cell's start, read before each cell.


ATOMS = frozenset(map(id, (int, float, str, bytes, bool, complex, type(None))))
"""Ids of the types of values that hold no memory of a device: it does not matter whether such a name was bound again."""


@dataclass(frozen=True, kw_only=True)
class CellStart:
    """The beginning of one cell. Numbers and names only: it keeps nothing of the user's alive."""

    cell: int  # number of the cell
    names: dict[str, int]  # ids of the values of the namespace
    atoms: frozenset[str]  # the names among them whose values are numbers, strings or None
    devices: dict[str, AllocatorCounts]  # counters by device; none of devices that the process had not used
    ended: dict[str, int] | None = None  # ids of the values of the namespace at the cell's end, once another cell begins


class _Latest:
    """The beginnings of the cell that runs now, or ran last, and of the last one that ran out of memory."""

    start: CellStart | None = None
    failed: CellStart | None = None
    lacking: tuple[int, str] | None = None  # number and id of the last cell that ran out of memory
    passed: tuple[int, ...] = ()  # that number, and the number of the cell's successful run since
    outlived: int | None = None  # that number, once another cell that got memory of a device has run through
    unbound: ClassVar[dict[int, frozenset[str]]] = {}  # names that a failed cell was to bind and did not, by its number
    unsaid: ClassVar[dict[int, frozenset[str]]] = {}  # names that a cell bound and its source does not, by its number


def note_start(cell: int, namespace: dict[str, Any], simulated: Mapping[str, AllocatorCounts]) -> None:
    """Keep the state at the start of cell number `cell`. `simulated` are the counters of a simulated device, if any."""
    values = [(name, value) for name, value in namespace.items() if type(name) is str]
    _Latest.start = CellStart(
        cell=cell,
        names={name: id(value) for name, value in values},
        atoms=frozenset(name for name, value in values if id(type(value)) in ATOMS),
        devices=_read() | dict(simulated),
    )


def start_of(cell: int | None) -> CellStart | None:
    """Return the state at a cell's start, or None if it was not noted or belongs to an earlier cell that did not fail."""
    starts = (start for start in (_Latest.start, _Latest.failed) if start is not None)
    return next((start for start in starts if start.cell == cell), None)


def keep_start(namespace: dict[str, Any]) -> None:
    """Keep the beginning of the last cell, which ran out of memory, beyond the beginning of the next one."""
    if _Latest.start is not None:
        ended = {name: id(value) for name, value in namespace.items() if type(name) is str}
        _Latest.failed = replace(_Latest.start, ended=ended)


def note_names(cell: int, inputs: Sequence[str], namespace: dict[str, Any], *, has_failed: bool) -> None:
    """Note the names that cell number `cell` bound though its source does not, as by `%run`.

    Of one that failed, also those that it did not come to bind, as they have the objects of its start.
    """
    start = start_of(cell)
    names = cell_names(inputs[cell]) if start is not None and cell < len(inputs) else None
    if start is None or names is None:
        return
    if has_failed:
        _Latest.unbound[cell] = frozenset(
            name for name in names.bound if name in start.names and start.names[name] == id(namespace.get(name))
        )
    new = (name for name, value in namespace.items() if type(name) is str and start.names.get(name) != id(value))
    if unsaid := frozenset(name for name in new if name not in names.bound and not name.startswith("_")):
        _Latest.unsaid[cell] = unsaid


def unbound_names() -> Mapping[int, frozenset[str]]:
    """Return the names that each failed cell was to bind and did not, by the cell's number."""
    return _Latest.unbound


def unsaid_names() -> Mapping[int, frozenset[str]]:
    """Return the names that a cell bound and its source does not, by the cell's number."""
    return _Latest.unsaid


def note_failure(cell: int, cell_id: str) -> None:
    """Note that cell number `cell` ran out of memory. `cell_id` is its id in its notebook, empty where nothing tells it."""
    _Latest.lacking = (cell, cell_id)
    _Latest.outlived = None


def note_success(cell: int, cell_id: str, inputs: Sequence[str], simulated: Mapping[str, AllocatorCounts]) -> None:
    """Note that cell number `cell` has run through: the last one that ran out of memory, edited or not, or its source again.

    Of any other it is noted whether a device gave it memory. `simulated` as of `note_start`.
    """
    if _Latest.lacking is None:
        return
    failed, failed_id = _Latest.lacking
    if _Latest.outlived is None and _has_got_memory(_read() | dict(simulated)):
        _Latest.outlived = failed
    if (cell_id and cell_id == failed_id) or (max(failed, cell) < len(inputs) and inputs[failed] == inputs[cell]):
        _Latest.passed = (failed, cell)


def passed_run() -> tuple[int, ...]:
    """Return the numbers of the last cell that ran out of memory and of its successful run since; none without such a run."""
    return _Latest.passed


def outlived_run() -> int | None:
    """Return the number of the last cell that ran out of memory, if another that a device gave memory has run through since."""
    return _Latest.outlived


def _has_got_memory(now: Mapping[str, AllocatorCounts]) -> bool:
    """Say whether a device has handed out blocks since the cell began."""
    start = {} if _Latest.start is None else _Latest.start.devices
    return any(device in start and counts.made_blocks > start[device].made_blocks for device, counts in now.items())


def forget_start() -> None:
    """Keep no beginning any more, and no outcome."""
    _Latest.start = _Latest.failed = _Latest.lacking = _Latest.outlived = None
    _Latest.passed = ()
    _Latest.unbound.clear()
    _Latest.unsaid.clear()


def counts_of(stats: dict[str, Any]) -> AllocatorCounts:
    """Return the counters among those of one device, as torch nests them."""
    return AllocatorCounts(
        allocated=stats["allocated_bytes"]["all"]["current"],
        reserved=stats["reserved_bytes"]["all"]["current"],
        made=stats["allocated_bytes"]["all"]["allocated"],
        made_blocks=stats["allocation"]["all"]["allocated"],
        retries=stats["num_alloc_retries"],
        failures=stats["num_ooms"],
        collections=full_collections(),
    )


def full_collections() -> int:
    """Return how often Python's collector has looked at all objects."""
    return int(gc.get_stats()[-1]["collections"])


def _read() -> dict[str, AllocatorCounts]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {f"cuda:{index}": counts_of(stats) for index, stats in enumerate(nested_stats(torch))}


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
    growing: Growing | None = None  # the container that it filled, as its card met it; None if it met none
    had_graph: bool = False  # its card met an autograd graph


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


def keep_findings(oom: OomFact, needed: int | None) -> None:
    """Keep the card's findings on the failed run, if it was the last: later a cleanup may have freed their subjects.

    Args:
        oom: the error, with its container that grows and its graph.
        needed: bytes that the run needed at the same time, at least; None if unknown.
    """
    if _RUNS and _RUNS[-1].start.cell == oom.cell:
        _RUNS[-1] = replace(_RUNS[-1], needed=needed, growing=oom.growing, had_graph=oom.had_graph)


def run_of_cell(cell: int | None) -> FailedRun | None:
    """Return the failed run of cell number `cell`, if it was kept."""
    return next((run for run in _RUNS if run.start.cell == cell), None)


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
