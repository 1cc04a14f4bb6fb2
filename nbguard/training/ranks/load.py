"""`nbguard.load_ranks`: dumps of PyTorch's flight recorder, of gloo or NCCL, from files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path

from nbguard.errors import RankFactsError
from nbguard.files import read_file, unreadable
from nbguard.training.ranks.analysis.causes import diagnosed
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis
from nbguard.training.ranks.analysis.facts import MOST_RANKS, RankFacts, from_text, job_of
from nbguard.training.ranks.analysis.flight_dump import LARGEST_DUMP, read_dump

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
