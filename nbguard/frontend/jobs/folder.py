"""The folder of a job's reports, with one file for each process that failed."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from nbguard.errors import NbguardError, RankFactsError
from nbguard.files import read_file, unreadable, write_file
from nbguard.frontend.jobs.failures import JobFailure, RankFailure, failure_of
from nbguard.plain_data import to_json
from nbguard.training.ranks.analysis.launch_errors import launch_of
from nbguard.training.ranks.rank import current_rank

_SUFFIX = ".failure.json"
_LARGEST = 1 << 24
"""Bytes of a report."""
_MOST = 1 << 16
"""Reports in a folder that are read."""
_JOB = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
"""Variables that all ranks of a job have alike, and no other job."""


def place_of_process(variables: Mapping[str, str]) -> tuple[int | None, int | None, str, str]:
    """Return (rank, number of ranks, launcher, job) of this process, by its process group or by its launcher's variables."""
    launch, rank = launch_of(variables), current_rank()
    number, world = (launch.rank, launch.world) if rank is None else (rank.rank, rank.world)
    job = " ".join(variables[name] for name in _JOB if variables.get(name))
    return number, world, launch.launcher, job if job and number is not None else f"{socket.gethostname()} {os.getpid()}"


def report_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the full path of a folder for reports, which is made when there is something to report.

    Raises:
        NbguardError: something else has its name, or no folder can be made there.
    """
    try:
        path = Path(folder).expanduser().absolute()
    except RuntimeError:
        raise NbguardError(f"{folder}: there is no such home folder") from None
    nearest = next(place for place in (path, *path.parents) if os.access(place, os.F_OK))
    if not nearest.is_dir():
        name = folder if nearest == path else nearest
        raise NbguardError(f"{name} is no folder: name one for the reports, as in  nbguard run --report reports train.py")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise NbguardError(f"{folder}: you may not write in {nearest}; name a folder of yours for the reports")
    return path


def write_failure(folder: Path, failure: RankFailure) -> None:
    """Write the report of this process as a whole, in the place of an earlier one of the same rank and host.

    Raises:
        OSError: it cannot be written.
    """
    host = re.sub(r"[^\w.-]", "_", failure.host)
    name = f"{host}.process-{failure.pid}" if failure.rank is None else f"rank-{failure.rank}.{host}"
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / f"{name}{_SUFFIX}", to_json(failure.to_data()) + "\n")


def job_report(folder: str | os.PathLike[str]) -> JobFailure:
    """Return the failures of the last job that left reports in a folder, with the rank that ran out first, and its card.

    The files may be strangers'.

    Args:
        folder: the DIR of `nbguard run --report DIR train.py`, or of `nbguard.install(report=DIR)`.

    Raises:
        RankFactsError: there is no such folder, or no report in it.
    """
    failures, damaged = list[RankFailure](), list[str]()
    for file in _files(Path(folder)):
        try:
            failures.append(failure_of(read_file(file, _LARGEST)))
        except OSError as error:
            damaged.append(unreadable(file.name, error))
        except RankFactsError as error:
            damaged.append(f"{file.name} cannot be read: {error}")
    if not failures:
        why = "; ".join(damaged[:1]) or "no process failed under  nbguard run --report DIR  with this folder"
        raise RankFactsError(f"{folder} has no reports of ranks: {why}")
    return JobFailure.of(failures, tuple(damaged))


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(file for file in folder.iterdir() if file.name.endswith(_SUFFIX))[:_MOST]
    except OSError as error:
        raise RankFactsError(unreadable(folder, error)) from None
