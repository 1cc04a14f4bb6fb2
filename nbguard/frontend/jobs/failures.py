"""The failures of a job's processes, each with its error and its out-of-memory card, the cause first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypedDict

from nbguard.errors import DamagedDataError, RankFactsError
from nbguard.memory.out_of_memory.card import OomCard, answer
from nbguard.plain_data import Within, from_plain, read_json
from nbguard.render.html import Block, Listing, Title
from nbguard.render.markup import clean, numbered
from nbguard.render.result import SCHEMA, Result
from nbguard.texts import capitalised
from nbguard.training.ranks.analysis.facts import MOST_RANKS, ranks_words
from nbguard.training.ranks.analysis.launch_errors import LaunchErrors, RankError, rank_table
from nbguard.units import counted

_LONGEST = 2000
"""Characters of a text in a file."""


class RankFailureData(TypedDict):
    """The fields of a process's failure in JSON."""

    rank: int | None  # its number in the job; None where it is the only process, or no launcher numbered it
    world: int | None  # number of the job's ranks
    host: str  # name of its machine
    pid: int  # number of the process
    launcher: str  # that started it: `torchrun`; empty if none is known
    job: str  # the job that it belongs to, the same for all its ranks
    at: float  # seconds since the epoch when it failed
    error: str  # "ValueError: a broken image"
    place: str  # the user's line that raised it: "train.py:31 in step()"; empty if unknown
    card: Annotated[dict[str, Any], OomCard] | None  # None where it did not run out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure(Result):
    """The error that ended one process of a job."""

    kind: ClassVar[str] = "rank_failure"
    view: ClassVar[str] = "nbguard.frontend.jobs.failures:failure_blocks"
    data: ClassVar[str] = "nbguard.frontend.jobs.failures:failure_data"
    label: ClassVar[str] = "The failure of a process"

    rank: Annotated[int, Within(0, MOST_RANKS - 1)] | None
    world: Annotated[int, Within(0, MOST_RANKS)] | None
    host: str
    pid: int
    launcher: str
    job: str
    at: Annotated[float, Within(0, 2**63 - 1)]
    error: str
    place: str
    card: OomCard | None

    @property
    def words(self) -> str:
        """Return the error in a sentence, with the request and the largest holder where memory ran out."""
        return self.error if self.card is None else f"{self.card.asked.error}: {answer(self.card)}"

    @property
    def named(self) -> str:
        """Return the process in words, as in "rank 2 of 4, process 4711 on node3"."""
        rank = "" if self.rank is None else f"rank {self.rank}" + (f" of {self.world}" if self.world else "")
        return ", ".join(filter(None, [rank, f"process {self.pid} on {self.host}"]))


def failure_data(failure: RankFailure) -> RankFailureData:
    """Return the fields of a process's failure in JSON; the card in it is a document of its own."""
    return RankFailureData(
        rank=failure.rank,
        world=failure.world,
        host=failure.host,
        pid=failure.pid,
        launcher=failure.launcher,
        job=failure.job,
        at=failure.at,
        error=failure.error,
        place=failure.place,
        card=None if failure.card is None else failure.card.to_data(),
    )


def failure_of(text: bytes) -> RankFailure:
    """Return the failure in a file.

    Raises:
        RankFactsError: the file has no failure.
    """
    try:
        raw = read_json(text)
        card = raw.get("card") if type(raw) is dict else None
        if type(raw) is not dict or (raw.pop("schema", None), raw.pop("kind", None)) != (SCHEMA, RankFailure.kind):
            raise RankFactsError("it is not the report of a rank that nbguard has written")
        if type(card) is dict:
            raw["card"] = {name: value for name, value in card.items() if name not in ("schema", "kind")}
        failure: RankFailure = from_plain(RankFailure, raw, text=lambda each: clean(each, _LONGEST))
    except DamagedDataError as error:
        raise RankFactsError(str(error)) from None
    except ValueError:
        raise RankFactsError("it is not JSON") from None
    if failure.card is not None and not failure.card.fixes:
        raise RankFactsError("its card is not whole")
    return failure


def failure_blocks(failure: RankFailure) -> Iterator[Block]:
    """Yield the process, and its card."""
    if failure.rank is not None:
        yield Title(f"nbguard, {failure.named}:", "dim")
    if failure.card is None:
        yield Title(failure.words, "strong")
    else:
        yield from failure.card.blocks()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure(Result):
    """The failures of the processes of one job, the cause first."""

    kind: ClassVar[str] = "job_failure"
    view: ClassVar[str] = "nbguard.frontend.jobs.failures:job_blocks"
    data: ClassVar[str] = "nbguard.frontend.jobs.failures:job_data"
    label: ClassVar[str] = "The failures of a job's ranks"

    failures: tuple[RankFailure, ...]  # at least one; those that ran out of memory first, then the others' by time
    silent: tuple[int, ...] = ()  # ranks that left no report
    left_out: int = 0  # reports of other jobs in the folder
    damaged: tuple[str, ...] = ()  # files that could not be read: a sentence each

    @classmethod
    def of(cls, failures: Iterable[RankFailure], damaged: tuple[str, ...] = ()) -> JobFailure:
        """Return the failures of the job that failed last; there is at least one."""
        every = tuple(failures)
        last = max(every, key=lambda failure: failure.at)
        own = [failure for failure in every if failure.job == last.job]
        world = max((failure.world or 0 for failure in own), default=0)
        ranks = {failure.rank for failure in own}
        return cls(
            failures=tuple(sorted(own, key=lambda failure: (failure.card is None, _error_of(failure).is_echo, failure.at))),
            silent=tuple(rank for rank in range(world) if rank not in ranks),
            left_out=len(every) - len(own),
            damaged=damaged,
        )

    @property
    def ran_out(self) -> tuple[RankFailure, ...]:
        """Return the failures by running out of memory, the first of them first."""
        return tuple(failure for failure in self.failures if failure.card is not None)

    @property
    def launch(self) -> LaunchErrors:
        """Return the same as the errors of a launch."""
        return LaunchErrors(errors=tuple(map(_error_of, self.failures)), silent=self.silent)


def _error_of(failure: RankFailure) -> RankError:
    return RankError(rank=failure.rank or 0, error=failure.words, place=failure.place, at=int(failure.at))


class JobFailureData(TypedDict):
    """The fields of a job's failure in JSON."""

    failures: list[Annotated[dict[str, Any], RankFailure]]  # those that ran out of memory first, then the others' by time
    silent: list[int]  # ranks that left no report
    left_out: int  # reports of other jobs in the folder
    damaged: list[str]  # files that could not be read: a sentence each


def job_data(job: JobFailure) -> JobFailureData:
    """Return the fields of a job's failure in JSON."""
    failures = [failure.to_data() for failure in job.failures]
    return JobFailureData(failures=failures, silent=[*job.silent], left_out=job.left_out, damaged=[*job.damaged])


def job_blocks(job: JobFailure) -> Iterator[Block]:
    """Yield the rank that ran out first, a row for each rank, and the card of the first."""
    yield Title(_sentence(job), "strong")
    if len(job.failures) + len(job.silent) > 1:
        yield rank_table(job.launch)
    notes = list(job.damaged)
    if job.left_out:
        notes.append(f"{counted(job.left_out, 'report')} of earlier jobs in this folder left out")
    if notes:
        yield Listing(sentences=tuple(notes))
    if job.ran_out:
        first = job.ran_out[0]
        yield from failure_blocks(first)


def _sentence(job: JobFailure) -> str:
    """Return who failed first, and how."""
    if not job.ran_out:
        return "No rank ran out of memory. " + capitalised(job.launch.sentence) + "."
    first = job.ran_out[0]
    at = f" at `{first.place}`" if first.place else ""
    if first.rank is None:
        return f"Process {first.pid} on {first.host} ran out of memory{at}."
    others = [failure.rank for failure in job.ran_out[1:] if failure.rank is not None]
    too = f"; {ranks_words(others)} ran out, too" if others else ""
    return f"{numbered('Rank', [first.rank])} ran out of memory{' first' if len(job.failures) > 1 else ''}{at}{too}."
