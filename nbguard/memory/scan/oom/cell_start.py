"""The allocators' counters and the ids of the names at a cell's start, read before each cell."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbguard.memory.core.oom_facts import AllocatorCounts
from nbguard.memory.scan.devices.cuda import nested_stats

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


def forget_start() -> None:
    """Keep no beginning any more."""
    _Latest.start = _Latest.failed = None


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
