"""What a profile says: every figure of the report, in nanoseconds and bytes. Renderers and exporters read nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from nbguard.memory.facts import Unavailable
from nbguard.render.result import Result

Ending = Literal["complete", "error", "interrupted", "out of memory", "stopped at NaN"]
Group = Literal["batch", "validation", "around"]
"""`batch`: inside training batches. `validation`: batches without a backward pass. `around`: everything else."""
Bound = Literal["data", "transfer", "compute", "Python", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """One phase: all its time, and per training batch of the steady state the median and the 95th percentile."""

    phase: str
    group: Group
    total: int
    median: int | None = None
    p95: int | None = None
    gpu: int | None = None  # median of the GPU's own time, where CUDA events were recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One pass over a loader: training, or validation if `is_training` is False."""

    number: int
    is_training: bool
    batches: int
    total: int
    wait: int
    start: int | None = None  # nanoseconds from the start of the recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time went. The totals of `rows` add up to `wall`."""

    wall: int
    rows: tuple[TimeRow, ...]
    batches: int  # training batches, warm-up and the unfinished one included
    warm_up: int  # of these, left out of medians and percentiles
    first: int | None = None  # the first batch, with what it starts
    step: int | None = None  # median of a whole batch in the steady state
    step_p95: int | None = None
    epochs: tuple[EpochRow, ...] = ()
    fits: int = 0  # of Learners
    busy: float | None = None  # share of the steady state in which the GPU worked, 0…1; None: not known
    busy_note: str = ""  # how it is known, or why it is not; empty where there was no GPU to be busy

    @property
    def medians(self) -> dict[str, int]:
        """Return the nanoseconds of each phase in a training batch of the steady state; 0 where they are not known."""
        return {row.phase: row.median or 0 for row in self.rows if row.group == "batch"}


@dataclass(frozen=True, slots=True)
class WorkerTrial:
    """One candidate of `--tune-workers`: how long a batch of the loader alone takes with it."""

    workers: int
    per_batch: int
    first: int  # nanoseconds until the first batch: the start of the workers
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderVerdict:
    """What the fit waits for, with the figure that says so and the gain to expect."""

    bound: Bound
    sentence: str
    gain: int | None = None  # nanoseconds per batch that go if it is fixed; None: nothing to gain, or not known
    advice: tuple[FitFinding, ...] = ()
    trials: tuple[WorkerTrial, ...] = ()
    best: int | None = None  # the number of workers that the trials speak for
    tuning: str = ""  # what the trials say in a sentence, or why there are none


Severity = Literal["problem", "advice", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "note")
"""The gravest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFinding:
    """One thing that stands out: what, the evidence with its figure, and the line to change. Code stands between backticks."""

    kind: str  # e.g. "graph", "nan", "eps", "sync", "workers", "transform", "callback"
    severity: Severity
    what: str
    evidence: str
    change: str
    time: int | None = None  # nanoseconds per batch that it costs
    nbytes: int | None = None  # bytes per batch by which it grows, or that it holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing that could be changed, with its effect: measured, or `measured=False` and words that say so."""

    name: str
    effect: str
    measured: bool
    change: str
    time: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The counters at a moment of the fit, in bytes."""

    at: int  # nanoseconds from the start
    phase: str  # the phase that has just ended
    batch: int
    allocated: int
    reserved: int | None = None


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most that was allocated in a phase. `is_exact` is False where only its ends were seen: at least so much."""

    phase: str
    peak: int
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Category:
    """Bytes of one kind at the peak, in the words of `nbguard.profiler.analysis.memory.categories`."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that grows: bytes per batch in the steady state, and who holds what grew, as far as it is known."""

    per_batch: int
    batches: int
    holder: str = ""
    held: int = 0
    per_epoch: int | None = None
    epochs: int = 1  # training epochs in which it was watched
    is_sum: bool = False  # the holder is one tensor, whose graph grows


@dataclass(frozen=True, slots=True)
class StackPeak:
    """Bytes that one line of code had allocated at the peak of the recorded batches."""

    site: str
    nbytes: int
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What the fit took of a device's memory. The categories add up to `peak`."""

    device: str
    source: str  # who counts: "torch.cuda", "simulated device", "heap of the process"
    peak: int
    start: int
    end: int
    capacity: int | None = None
    peak_reserved: int | None = None
    peak_phase: str = ""
    phases: tuple[PhasePeak, ...] = ()
    categories: tuple[Category, ...] = ()
    points: tuple[MemoryPoint, ...] = ()
    growth: Growth | None = None
    stacks: tuple[StackPeak, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """One switch of the environment that matters for speed or repeatability."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank of a distributed fit. `state` says how it ended, or what it last did."""

    rank: int
    host: str
    pid: int
    state: str
    batches: int = 0
    step: int | None = None
    wait: int | None = None
    backward: int | None = None
    peak: int | None = None
    device: str = ""


@dataclass(frozen=True, slots=True)
class RankReport:
    """All ranks, and what differs between them."""

    world: int
    rows: tuple[RankRow, ...]
    findings: tuple[FitFinding, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure now and in the run before; `is_significant` is None where too few batches say anything."""

    name: str
    unit: Literal["ns", "bytes", "batches"]
    before: int
    now: int
    is_significant: bool | None = None
    low: float | None = None  # of the ratio now / before, 95 % of resampled medians
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """This run against an earlier one."""

    sentence: str
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the profile itself has cost, by its own measurement."""

    per_mark: int  # nanoseconds
    marks: int
    watching: int  # nanoseconds in which nbguard looked: the row "nbguard itself"
    share: float  # of the wall time, both together

    @property
    def total(self) -> int:
        """Return the nanoseconds of both."""
        return self.per_mark * self.marks + self.watching


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport(Result):
    """The whole report."""

    kind: ClassVar[str] = "fitreport"
    view: ClassVar[str] = "nbguard.profiler.render.fit:fit_blocks"
    label: ClassVar[str] = "profile of a fit"

    title: str  # e.g. "In[7] · fastai fit · resnet34"
    ending: Ending
    timing: Timing
    overhead: Overhead
    first: tuple[str, ...] = ()  # what to do first, most rewarding first, in a sentence each
    error: str = ""  # of a partial report, e.g. "KeyboardInterrupt"
    loader: LoaderVerdict | None = None
    memory: MemoryReport | Unavailable | None = None
    findings: tuple[FitFinding, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    settings: tuple[Setting, ...] = ()
    ranks: RankReport | None = None
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # written by --trace, --json and --log
    missed: int = 0  # batches that were over when the profile began

    @property
    def is_partial(self) -> bool:
        """Say whether the fit did not come to its end, or had begun before the profile."""
        return self.ending != "complete" or self.missed > 0
