"""PyTorch's flight recorder of this process, with the progress of its collectives, and a dump of the last of them.

gloo and NCCL record without being asked; `TORCH_FR_BUFFER_SIZE=0` turns it off. It can be read while the main thread waits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nbguard.errors import RankFactsError
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.training.ranks.analysis.facts import CollectiveCall
from nbguard.training.ranks.analysis.flight_dump import read_dump

_KEPT = 200
"""Calls of a dump that are handed on: ranks that wait for each other are never that far apart."""
Progress = tuple[tuple[str, int, int], ...]
"""Of each process group its name, how many collectives it began and how many ended."""


_is_warm = False


def _dumps(name: str) -> list[Any]:
    """Return the functions of this name: of all backends, and of NCCL's own recorder once CUDA is in use."""
    torch: Any = sys.modules.get("torch")
    native: Any = sys.modules.get("torch._C._distributed_c10d")
    names = [f"_dump_fr_trace{name}"]
    if torch is not None and torch.cuda.is_initialized():
        names.append(f"_dump_nccl_trace{name}")
    return [function for each in names if (function := getattr(native, each, None)) is not None]


def warm_up() -> None:
    """Make a dump that nobody reads, as the first with stacks takes seconds of a core while PyTorch loads symbols."""
    global _is_warm
    for dump in _dumps(""):
        dump()
    _is_warm = True


def progress() -> Progress:
    """Return how far the process groups are; empty without a recorder."""
    groups = []
    for dump in _dumps("_json"):
        for name, status in (json.loads(dump(False, False)).get("pg_status") or {}).items():
            groups.append((name, int(status["last_enqueued_collective"]), int(status["last_completed_collective"])))
    return tuple(groups)


def recorded_calls() -> tuple[CollectiveCall, ...]:
    """Return the last calls of this process; none where there is no recorder, or its dump is of a format not known.

    Their lines are told once `warm_up` has been called: until then stacks would take seconds.
    """
    sites = Sites()
    calls: list[CollectiveCall] = []
    for dump in _dumps(""):
        try:
            calls += read_dump(dump(True, _is_warm, False), sites.of).calls[-_KEPT:]
        except RankFactsError:
            continue
    return tuple(calls)


def group_ranks() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the process groups that this rank knows, each with its ranks."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world: Any = getattr(module, "_world", None)
    if world is None:
        return ()
    named = ((world.pg_names.get(group), ranks) for group, ranks in world.pg_group_ranks.items())
    return tuple((name, tuple(ranks)) for name, ranks in named if name is not None)  # a group of others has no name here
