"""The report of a profile, with every figure that is shown, in nanoseconds and bytes. Renderers read only this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from nbguard.memory.core.facts import RootKind, Unavailable
from nbguard.render.result import Result
from nbguard.training.profiler.analysis.operators import OperatorTable
from nbguard.training.profiler.analysis.slowest import FileReading, LoaderPart, StoragePace
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.runs.analysis.record import RunRecord

Ending = Literal["complete", "error", "interrupted", "out of memory", "stopped at NaN"]
Group = Literal["batch", "validation", "around"]
"""`batch`: inside training batches. `validation`: batches without a backward pass, but for the first one of a training pass
whose error came before it. `around`: everything else."""
Bound = Literal["data", "transfer", "compute", "Python", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """One phase: its whole time, and its time per batch of the steady state. In nanoseconds of the host's clock."""

    phase: str  # in the words of `phases`, e.g. "forward"
    group: Group  # where in the fit
    total: int  # sum over the fit
    callback: str = ""  # class of the callback whose code this is; "": no callback's
    median: int | None = None  # of a batch; None if not in training batches
    p95: int | None = None  # 95th percentile of a batch; None likewise
    gpu: int | None = None  # median of the GPU's own time, where CUDA events were recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One pass over a loader: training, or validation if `is_training` is False."""

    number: int  # from 1, training and validation counted apart
    is_training: bool  # False: no backward pass was seen in it, and no error in its first batch with a model in training mode
    batches: int  # that the loader gave
    total: int  # nanoseconds of its batches, without nbguard itself
    wait: int  # nanoseconds of these spent waiting for data
    start: int | None = None  # nanoseconds from the start of the recording


_IN_FEW = 0.25
"""Share of a part's time that its usual batches take at most, where it is said that few batches take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The time of a fit by phase. The totals of `rows` add up to `wall`. Times in nanoseconds."""

    wall: int  # from start to finish of the profile
    rows: tuple[TimeRow, ...]  # training batches first, then validation, then around them
    batches: int  # training batches, warm-up and the unfinished one included
    warm_up: int  # of these, left out of medians and percentiles
    first: int | None = None  # the first batch, with the start of workers and libraries
    step: int | None = None  # median of a whole batch in the steady state
    step_p95: int | None = None  # its 95th percentile
    epochs: tuple[EpochRow, ...] = ()  # in the order of their beginning
    fits: int = 0  # of Learners
    busy: float | None = None  # share of the steady state with the GPU behind the program, 0…1; None if unknown
    busy_note: str = ""  # how it is known, or why it is not; empty where there was no GPU to be busy
    gpu: str = ""  # name of the GPU, by its driver; empty where there was none

    @property
    def medians(self) -> dict[str, int]:
        """Return the nanoseconds of each phase in a training batch of the steady state; 0 where they are not known."""
        return {row.phase: row.median or 0 for row in self.rows if row.group == "batch"}

    @property
    def gainable(self) -> int:
        """Return the nanoseconds of a batch that the program can save, as its work costs nothing while a GPU is behind it."""
        return round((1 - (self.busy or 0)) * (self.step or 0))

    @property
    def own(self) -> int:
        """Return the nanoseconds of nbguard itself, which are no part of a usual fit."""
        return sum(row.total for row in self.rows if row.phase == phase_log.OWN)

    def of_fit(self, per_batch: int) -> int:
        """Return the nanoseconds of the whole fit that so many of a usual batch are: no more than training batches took."""
        return min(per_batch * self.batches, sum(row.total for row in self.rows if row.group == "batch"))

    def is_in_few(self, total: int, median: int) -> bool:
        """Say whether few batches take most of a part's time in all, by its time in the median batch."""
        return median * self.batches <= _IN_FEW * total


@dataclass(frozen=True, slots=True)
class WorkerTrial:
    """One candidate of `--tune-workers`: how long a batch of the loader alone takes with it."""

    workers: int  # number of worker processes
    per_batch: int  # nanoseconds
    first: int  # nanoseconds until the first batch: the start of the workers
    note: str = ""


def _in_json(name: str) -> Any:
    """Return a field that is None by default and is called `name` in JSON, which readers depend on."""
    return field(default=None, metadata={"json": name})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderVerdict:
    """The verdict on the loader: the bound of the fit, the figure that says so, and the gain to expect."""

    bound: Bound  # the thing a batch of the steady state mostly waits for
    sentence: str  # the verdict in words, with its figure
    items_per_second: float | None = _in_json("items")  # items per second that the fit took; None if the batch size is unknown
    possible_items_per_second: float | None = _in_json("possible")  # items per second that it makes alone, with all workers
    reading: FileReading | None = None  # from files, by the training batches' loader; None if nothing or unknown
    parts: tuple[LoaderPart, ...] = ()  # the way of a training batch to the model; empty if unknown
    gain: int | None = None  # nanoseconds per batch that go if it is fixed; None if nothing to gain, or not known
    advice: tuple[FitFinding, ...] = ()  # the most rewarding first
    trials: tuple[WorkerTrial, ...] = ()  # of `--tune-workers`
    best: int | None = None  # the number of workers that the trials speak for
    tuning: str = ""  # the result of the trials in a sentence, or why there are none
    storage: StoragePace | None = None  # of its files, measured with the trials; None if not measured


Severity = Literal["problem", "advice", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "note")
"""The gravest first."""
Concern = Literal["result", "memory", "time"]
_CONCERNS: tuple[Concern, ...] = ("result", "memory", "time")
"""Right results come before memory, and memory comes before speed."""
_OF_RESULTS = frozenset(
    (
        "failure",
        "not trained",
        "frozen",
        "loss input",
        "nan",
        "data",
        "divergence",
        "eps",
        "zero_grad",
        "step",
        "renewed",
        "eval",
        "amp",
        "range",
        "rank",
        "unused",
    )
)
_OF_MEMORY = frozenset(
    ("graph", "growth", "loop names", "no_grad", "rank memory", "retain_graph", "temporaries", "unfrozen", "worker memory")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFinding:
    """One thing that stands out: its title, the evidence with its figure, and the line to change. Code is in backticks."""

    kind: str  # e.g. "graph", "nan", "eps", "sync", "cache", "workers", "transform", "validation", "stall"
    severity: Severity  # the gravest come first in a report
    what: str  # the finding in a sentence
    evidence: str  # the figures behind it
    change: str  # the line to change; "": there is nothing to do
    time: int | None = None  # nanoseconds per batch that it costs
    nbytes: int | None = None  # bytes per batch of its growth, or that it holds
    total: int | None = None  # nanoseconds of the whole fit that it costs, where it is not a cost per batch

    @property
    def concern(self) -> Concern:
        """Return the kind of its harm."""
        return "result" if self.kind in _OF_RESULTS else "memory" if self.kind in _OF_MEMORY else "time"

    @property
    def rank(self) -> tuple[int, int]:
        """Return its place among findings, the lowest first: by its severity, then by the kind of its harm."""
        return SEVERITIES.index(self.severity), _CONCERNS.index(self.concern)


def gravest_first(findings: Iterable[FitFinding]) -> tuple[FitFinding, ...]:
    """Return findings in the order of a report; alike ones as they came."""
    return tuple(sorted(findings, key=lambda finding: finding.rank))


RemedyKind: TypeAlias = Literal["", "smaller batch", "checkpointing"]
"""A remedy whose bytes a prediction may know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing that could be changed, with its effect: measured, or `measured=False` and words that say so."""

    name: str  # e.g. "mixed precision"
    effect: str  # in words, with the figure if it was measured
    measured: bool  # False: `effect` says that it is not
    change: str  # the line to write
    time: int | None = None  # nanoseconds per batch that it saves; None if unknown
    nbytes: int | None = None  # bytes that it saves; None if unknown
    kind: RemedyKind = field(default="", metadata={"json": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The counters at one moment of the fit, in bytes."""

    at: int  # nanoseconds from the start
    phase: str  # the phase that has just ended
    batch: int  # number of the batch, from 1, as boundaries of batches were counted
    allocated: int  # in tensors; of host memory: in use, by malloc
    reserved: int | None = None  # by PyTorch's allocator; None if not counted


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most that was allocated in a phase. `is_exact` is False where only its ends were seen: at least so much."""

    phase: str
    peak: int
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Category:
    """Bytes of one kind at the peak, in the words of `nbguard.training.profiler.analysis.recorded_batch`."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that grows in the steady state, and its holder as far as it is known."""

    per_batch: int  # bytes; 0 if only the growth per epoch is known, or only that graphs grow
    batches: int  # training batches of the watch
    holder: str = ""  # the way to it as one would write it, e.g. "losses"; "": not known
    root: RootKind = "name"  # the kind of the root where this way begins; "garbage": cycles that wait for Python's collector
    is_graph: bool = False  # the autograd graphs of its tensors grow
    held: int = 0  # bytes that the holder had at the last scan
    per_epoch: int | None = None  # bytes; None if none, or too few epochs
    epochs: int = 1  # training epochs of the watch
    is_sum: bool = False  # the holder is one tensor, whose graph grows
    is_state: bool = False  # this tensor has several values: a state carried from batch to batch
    container: str = "list"  # class of the holder, by its name
    is_retained: bool = False  # `retain_graph=True` keeps the graphs usable
    is_on_host: bool = False  # it is host memory that grows


@dataclass(frozen=True, slots=True)
class StackPeak:
    """Bytes that one line of code had allocated at the peak of the recorded batches."""

    site: str
    nbytes: int
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The memory of a fit on one device, in bytes. The categories add up to `peak`."""

    device: str  # as torch writes it, e.g. "cuda:0"
    source: str  # of the figures: "torch.cuda", "simulated device", "heap of the process"
    peak: int  # the most that was allocated at once
    start: int  # allocated when the profile began
    end: int  # allocated when the fit had ended
    capacity: int | None = None  # of the device, as far as PyTorch may use it; None for no limit
    peak_reserved: int | None = None  # the most that PyTorch had reserved; None if not counted
    peak_phase: str = ""  # of the peak; "" if unknown
    phases: tuple[PhasePeak, ...] = ()  # in the order of first sight
    categories: tuple[Category, ...] = ()  # of the bytes at the peak
    points: tuple[MemoryPoint, ...] = ()  # over time, thinned
    growth: Growth | None = None  # None if memory did not grow
    stacks: tuple[StackPeak, ...] = ()  # lines of code behind the peak; from `--memory`
    notes: tuple[str, ...] = ()  # limits of these figures, in words


@dataclass(frozen=True, slots=True)
class Setting:
    """One switch of the environment that matters for speed or repeatability."""

    name: str
    value: str
    note: str = ""
    is_version: bool = False  # of Python or a package: installed, not set


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank of a distributed fit. `state` says how it ended, or its last sign of life."""

    rank: int  # its number, from 0
    host: str  # name of its machine
    pid: int  # of its process
    state: str  # how it ended, or its last sign of life
    batches: int = 0  # training batches
    step: int | None = None  # nanoseconds, median of a whole batch; None for too few
    wait: int | None = None  # nanoseconds of a batch waiting for data
    backward: int | None = None  # nanoseconds of a batch in the backward pass
    peak: int | None = None  # bytes of memory; None if not counted
    device: str = ""  # as torch writes it; "": not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """All ranks, and the differences between them."""

    world: int  # number of ranks
    rows: tuple[RankRow, ...]  # by rank
    findings: tuple[FitFinding, ...] = ()
    note: str = ""  # ranks that did not report, in words
    launch: str = ""  # launcher, rank and number of ranks, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChange:
    """One figure now and in the run before; `is_significant` is None where too few batches say anything."""

    name: str  # of a phase, or "step", "peak memory", "batches"
    unit: Literal["ns", "bytes", "batches"]  # of `before` and `now`
    before: int  # in the earlier run
    now: int  # in this run
    is_significant: bool | None = None  # None if too few batches to tell
    low: float | None = None  # of the ratio now / before, 95 % of resampled medians
    high: float | None = None  # its upper end


@dataclass(frozen=True, slots=True)
class Comparison:
    """This run against an earlier one."""

    sentence: str  # the result in words
    changes: tuple[RunChange, ...] = ()  # the step first, then phases by the size of the difference
    notes: tuple[str, ...] = ()  # other differences between the runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The processor time that the profile took in all, by its own measurement, in nanoseconds.

    The work in each batch is estimated: its calls are counted, and some of them timed.
    """

    per_mark: int  # cost of a mark, with its share of everything else that is done in a batch
    marks: int  # how many there are
    watching: int  # at events of the fit, for samples of stacks, and for profiles of fetches
    share: float  # all of it, as a part of what the fit took without the profile
    before: int = 0  # to import nbguard's modules and to begin
    after: int = 0  # to end, and to make and show the report

    @property
    def during(self) -> int:
        """Return the nanoseconds while the fit went on."""
        return self.per_mark * self.marks + self.watching

    @property
    def total(self) -> int:
        """Return all nanoseconds."""
        return self.before + self.during + self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport(Result):
    """The whole report."""

    kind: ClassVar[str] = "fit_report"
    view: ClassVar[str] = "nbguard.training.profiler.render.fit:fit_blocks"
    label: ClassVar[str] = "profile of a fit"

    title: str  # e.g. "In[7] · PyTorch loop · ResNet"
    ending: Ending  # how the fit ended
    timing: Timing  # the time by phase
    overhead: Overhead  # the cost of the profile
    first: tuple[str, ...] = ()  # the first things to do, most rewarding first, in a sentence each
    error: str = ""  # of a partial report, e.g. "KeyboardInterrupt"
    loader: LoaderVerdict | None = None  # None only in reports made by hand
    memory: MemoryReport | Unavailable | None = None  # Unavailable: it could not be followed
    findings: tuple[FitFinding, ...] = ()  # the gravest first, as far as they are of one kind
    remedies: tuple[Remedy, ...] = ()  # changes that would save memory or time
    settings: tuple[Setting, ...] = ()  # switches of torch and the environment, as in the first training batch
    ranks: RankReport | None = None  # of a distributed fit, on rank 0
    operators: OperatorTable | None = None  # operators that take most time; None without `--ops`
    comparison: Comparison | None = None  # with an earlier run, where that was asked for
    notes: tuple[str, ...] = ()  # limits of the profile and mistakes of nbguard, in words
    files: tuple[str, ...] = ()  # written by --trace, --json and --log
    missed: int = 0  # batches that were over when the profile began
    scaled_steps: int = 0  # that a GradScaler decided on
    skipped_steps: int = 0  # of these, skipped as their gradients were not finite
    earlier: tuple[FitReport, ...] = ()  # of the fits before this one in the same cell, the first one first
    record: RunRecord | None = field(default=None, metadata={"json": False}, repr=False)  # of the run, with --log

    def display_metadata(self) -> dict[str, Any]:
        """Return the record of the run, if there is one, so that the saved notebook has it."""
        return {} if self.record is None else self.record.display_metadata()

    @property
    def is_partial(self) -> bool:
        """Say whether the fit did not come to its end, or had begun before the profile."""
        return self.ending != "complete" or self.missed > 0
