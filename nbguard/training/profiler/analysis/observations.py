"""Everything that the instruments of one profile saw, as one frozen value that can be saved, loaded and analysed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from nbguard.errors import DamagedDataError, ProfileFileError
from nbguard.libraries import setting
from nbguard.memory.core.advice import SAVE_FIT
from nbguard.memory.core.facts import Unavailable
from nbguard.plain_data import check, from_plain, to_plain
from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis.compare import FitSamples
from nbguard.training.profiler.analysis.distributed.ranks import RankObservations
from nbguard.training.profiler.analysis.health.nonfinite import FiniteFacts
from nbguard.training.profiler.analysis.loader.fetches import LoaderFacts
from nbguard.training.profiler.analysis.loader.tried import LoaderRun, WorkerTuning
from nbguard.training.profiler.analysis.memory.growth import KeptGraphs
from nbguard.training.profiler.analysis.memory.memory_report import MemoryObservations
from nbguard.training.profiler.analysis.operators import OperatorFacts
from nbguard.training.profiler.analysis.report import Ending
from nbguard.training.profiler.analysis.time.gpu import GpuObservations
from nbguard.training.profiler.analysis.time.phase_log import PhaseLog, pack_log, unpack_log
from nbguard.training.profiler.analysis.time.stacks import StackSamples
from nbguard.training.profiler.checks.check import facts_of
from nbguard.training.runs.analysis.record import RunRecord

_Facts = TypeVar("_Facts")

KIND = "fit observations"
VERSION = 2
"""Version of the format of saved observations: another number whenever a field changes its meaning or goes."""

_SHOWN = 20
"""Characters of another version that are shown."""

Failure = Literal["batch norm of one", ""]
LEARNERS = setting("fit")
"""The kind of a fit of a Learner."""


@dataclass(frozen=True, slots=True)
class SubjectFacts:
    """The models that were trained, by name."""

    kind: str = "PyTorch loop"  # or LEARNERS, once one was fitted
    names: tuple[str, ...] = ()  # of model classes and of architectures by their functions, in the order of their first call
    missed: int = 0  # batches that the loop got before the profile began
    is_compiled: bool = False  # one of them at least, by torch.compile

    @property
    def is_learners(self) -> bool:
        """Say whether a Learner was fitted."""
        return self.kind == LEARNERS

    @property
    def title(self) -> str:
        """Return the subject in words, the kind first; an empty string where no model was called."""
        return " · ".join((self.kind, *self.names)) if self.names else ""


def _read_checks(data: Any, where: str) -> dict[str, Any]:
    """Return the facts of checks, by their names, from plain data; DamagedDataError where they are of something else."""
    kinds = {check.name: check.facts for check in fit_checks.CHECKS}
    check(type(data) is dict and kinds.keys() >= data.keys(), where, "facts of checks", data)
    return {name: from_plain(kinds[name], facts, f"{where}.{name}") for name, facts in data.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitObservations:
    """One profile as its instruments saw it. Times are nanoseconds, sizes are bytes; no object of the user's is in it."""

    title: str = ""  # of the cell, e.g. "In[7]"; "" in a script
    ending: Ending = "complete"  # how the fit ended
    error: str = ""  # the type of the exception that ended the fit, e.g. "KeyboardInterrupt"; "" if none did
    failure: Failure = ""  # the cause of that exception, where it is one of those known
    log: Annotated[PhaseLog, unpack_log] = field(metadata={"plain": pack_log})  # phases, with the boundaries of batches
    mark_cost: int = 0  # nanoseconds that one mark of the log costs the fit, with its share of the other work in each batch
    cores: int = 1  # CPU cores that the process may use, by its affinity and control group
    subject: SubjectFacts = field(default_factory=SubjectFacts)  # names of the models that were trained
    loaders: tuple[LoaderFacts, ...] = ()  # those that were asked for batches
    gpu: GpuObservations = field(default_factory=GpuObservations)  # events in the GPU's stream
    memory: MemoryObservations | Unavailable  # counters and samples; Unavailable: the reason why there are none
    checks: Annotated[Mapping[str, Any], _read_checks] = field(default_factory=dict)  # facts of each check, by its name
    finite: FiniteFacts = field(default_factory=FiniteFacts)  # values that were NaN or infinite
    stacks: StackSamples = field(default_factory=StackSamples)  # lines that the fit was at, now and then
    operators: OperatorFacts | None = None  # of some batches, with `--ops`; None if not asked for
    library_callbacks: tuple[str, ...] = ()  # phases of callbacks without which a library does not train
    has_other_threads: bool = False  # another thread asked a loader for batches
    mistakes: tuple[str, ...] = ()  # instruments of ours that failed, in words for the user
    kept_graphs: tuple[KeptGraphs, ...] = ()  # names that held autograd graphs after the fit
    tuning: WorkerTuning | None = None  # trials of `--tune-workers`; None if not asked for
    tried: tuple[LoaderRun, ...] = ()  # earlier runs of the same fit in this process, the latest last
    ranks: RankObservations | None = None  # messages of all ranks, on rank 0; None for one process, or another rank
    is_compared: bool = False  # with `--compare last`
    earlier: tuple[FitObservations, ...] = ()  # of the fits before it in the same cell, each with its part of the log
    before: FitSamples | None = None  # the run to compare with; None without one
    record: RunRecord | None = None  # of the run's parts, where it is logged; None if not asked for

    def of(self, kind: type[_Facts]) -> _Facts:
        """Return the facts of one check, or the facts of an unobserved fit where there are none."""
        return facts_of(self.checks.values(), kind)

    def to_json(self) -> str:
        """Return the observations as one line of JSON."""
        data = {"kind": KIND, "version": VERSION, **to_plain(self, tables=True)}
        return json.dumps(data, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> FitObservations:
        """Return the observations that `to_json` has written.

        Raises:
            ProfileFileError: the text is something else, of another version, or damaged.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise ProfileFileError("it holds no JSON: save a profile with " + SAVE_FIT.code) from None
        if type(data) is not dict or data.get("kind") != KIND:
            raise ProfileFileError("it holds something else: save a profile with " + SAVE_FIT.code)
        version = data.get("version")
        if version != VERSION:
            raise ProfileFileError(
                f"it was saved by another version of nbguard (its format is {repr(version)[:_SHOWN]}, "
                f"this version reads {VERSION}): read it with that version, or profile the fit again"
            )
        data = {name: value for name, value in data.items() if name not in ("kind", "version")}
        try:
            observations: FitObservations = from_plain(cls, data)
        except DamagedDataError as error:
            raise ProfileFileError(str(error)) from None
        return observations
