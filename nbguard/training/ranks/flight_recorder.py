"""`nbguard.load_ranks`: dumps of PyTorch's flight recorder, of gloo or NCCL, from files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from nbguard.errors import RankFactsError
from nbguard.files import read_file, unreadable
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.training.ranks.analysis.causes import diagnosed
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis
from nbguard.training.ranks.analysis.facts import MOST_RANKS, CollectiveCall, RankFacts, from_text, job_of
from nbguard.training.ranks.analysis.flight_dump import LARGEST_DUMP, read_dump

# --- PyTorch's flight recorder of this process, with the progress of its collectives, and a dump of the last of them
#
# gloo and NCCL record without being asked; `TORCH_FR_BUFFER_SIZE=0` turns it off. It can be read while the main thread waits.


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


# --- load


_NUMBER = re.compile(r"(?<!\d)(\d{1,9})(?:\.\w{1,20})?$", re.ASCII)


def load_ranks(paths: Iterable[str | PathLike[str]]) -> RankDiagnosis:
    """Return the diagnosis of dumps of the ranks of one job: which rank, which collective, which line.

    The files may be strangers': nothing in them is run.

    Args:
        paths: one file per rank: a dump of the flight recorder as NCCL's watchdog writes it (`TORCH_FR_DUMP_TEMP_FILE`) or
            `torch._C._distributed_c10d._dump_fr_trace()` returns it, its name ending with the number of the rank
            (`nccl_trace_rank_3`); or facts that nbguard has written, which know it.

    Raises:
        RankFactsError: a file cannot be read, is neither, or does not name its rank, of at most 65,536; one line
            says which and why.
    """
    ranks = {}
    for path in map(Path, paths):
        facts = _facts(path)
        if facts.rank in ranks:
            raise RankFactsError(f"{path.name}: there is another file of rank {facts.rank}: give one file per rank.")
        ranks[facts.rank] = facts
    if not ranks:
        raise RankFactsError("no files: give one dump per rank, as in  nbguard.load_ranks(Path().glob('nccl_trace_rank_*'))")
    world = max(max(ranks) + 1, *(facts.world for facts in ranks.values()))
    return diagnosed(job_of(replace(facts, world=world) for facts in ranks.values()))


def _facts(path: Path) -> RankFacts:
    try:
        data = read_file(path, LARGEST_DUMP)
    except OSError as error:
        raise RankFactsError(unreadable(path.name, error)) from None
    try:
        if data[:1] == b"{":
            return from_text(data)
        dump = read_dump(data)
    except RankFactsError as error:
        raise RankFactsError(f"{path.name}: {error}") from None
    number = _NUMBER.search(path.name)
    if number is None or int(number[1]) >= MOST_RANKS:
        raise RankFactsError(
            f"{path.name}: end its name with the number of the rank, as in  trace_rank_3  (jobs of up to {MOST_RANKS} ranks)"
        )
    return RankFacts(rank=int(number[1]), world=0, state="running", calls=dump.calls)
