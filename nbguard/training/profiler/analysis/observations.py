"""Everything that the instruments of one profile saw, as one frozen value that can be saved, loaded and analysed again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from nbguard.errors import DamagedDataError, ProfileFileError
from nbguard.libraries import in_own_words, setting
from nbguard.memory.core.advice import SAVE_FIT
from nbguard.memory.core.facts import Unavailable
from nbguard.plain_data import check, from_plain, read_json, to_plain
from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis.compare import FitSamples
from nbguard.training.profiler.analysis.loader_verdict import LoaderRun, WorkerTuning
from nbguard.training.profiler.analysis.memory_growth import KeptGraphs, MemoryObservations
from nbguard.training.profiler.analysis.nonfinite import FiniteFacts
from nbguard.training.profiler.analysis.operators import OperatorFacts
from nbguard.training.profiler.analysis.ranks import RankObservations
from nbguard.training.profiler.analysis.report import Ending, FitFinding, Group, LoaderVerdict, MemoryReport, Remedy, Timing
from nbguard.training.profiler.analysis.slowest import LoaderFacts
from nbguard.training.profiler.analysis.time.gpu import GpuObservations
from nbguard.training.profiler.analysis.time.phase_log import OWN, PhaseLog, pack_log, unpack_log
from nbguard.training.profiler.analysis.time.stacks import StackSamples
from nbguard.training.profiler.checks.amp import AmpFacts
from nbguard.training.profiler.checks.check import facts_of
from nbguard.training.profiler.checks.optimizer_facts import OptimizersFacts
from nbguard.training.profiler.checks.switches import SwitchFacts
from nbguard.training.runs.analysis.record import RunRecord
from nbguard.units import MiB, format_bytes, format_time

# --- The few sentences at the beginning of the report, on the first things to do.


_MOST = 3
_WAITS = ("data", "transfer", "Python")
_WORTH = 0.02
"""Of a batch, or of the fit: advice that would save less is not among the first things to do."""
_LARGE = 0.10
"""Share of the fit: a finding that would save so much comes before a verdict that only says that the GPU waits for Python."""
_NAMED = 0.05
"""Least share of the wall time of a part that is named where nothing stands out."""
_HALF = 0.5
"""Share of the fit: a shorter wait for data without a known cause is the time that batches take to be made."""
_NOTICED = 50_000_000
"""Nanoseconds of the fit: waiting that takes less is not mentioned, however short the fit."""
_GROWS = ("graph", "growth")
"""Kinds of findings on memory that grows."""
_COPIES = ("worker memory",)
"""Kinds of findings on memory that is there several times: from `_MUCH_MEMORY` on it counts as growth does."""
_STAYS = ("retain_graph", "temporaries")
"""Kinds of findings on memory that stays for a while in each batch."""
_MUCH_MEMORY = 64 * MiB
"""Growth in the fit, of memory, that comes before any loss of time;"""
_SOME_MEMORY = 8 * MiB
"""growth, and memory that stays in each batch, that is mentioned;"""
_AS_TIME = 0.25
"""and share of the fit's time that less growth counts as."""
_COSTS_LATER = ("cache",)
"""Kinds of findings whose time is the least part of their cost, in other phases: they count as such growth does."""
_UNCOUNTED = ("no_grad", "frozen")
"""Kinds of findings whose cost has no figure: they are said after those that have one."""
_CODE = ("code", "callback", "library")
"""Kinds of findings that name code: where they explain half of the fit's wait, the verdict says nothing more."""
_GROUPS: dict[Group, str] = {"batch": "", "validation": "validation", "around": "around the batches"}


@dataclass(frozen=True, slots=True)
class _Step:
    """One thing to do, with the figures that decide on its place."""

    sentence: str
    lost: int  # nanoseconds of the whole fit that it may save
    rank: tuple[int, int] | None = None  # of a problem's finding: the fit is wrong, not only slow


def first_steps(timing: Timing, loader: LoaderVerdict | None, findings: Iterable[FitFinding]) -> tuple[str, ...]:
    """Return the first things to do: problems, then by the time that they would save of the whole fit.

    One sentence where nothing stands out, with the largest parts of the time.
    """
    if not timing.batches:
        said = {finding.kind: finding.what + ": " + finding.change for finding in findings}
        nothing = "nothing was trained here; this thread ran no backward pass and no optimizer step"
        unused = [said["no_grad"]] if "no_grad" in said else []
        return (said.get("autograd.grad", nothing), *unused)
    known = list(findings)
    steps = [_step(finding, timing) for finding in known if finding.severity == "problem" or _is_worth_it(finding, timing)]
    is_short = is_usual = False
    if loader is not None and loader.bound in _WAITS and not any(finding in loader.advice for finding in known):
        lost = timing.of_fit(loader.gain or 0)
        is_named = 2 * sum(_lost(finding, timing) for finding in known if finding.kind in _CODE) >= lost > 0
        is_usual = loader.bound == "data" and lost < _HALF * timing.of_fit(timing.step or 0) and not loader.advice
        is_short = not is_named and not is_usual and lost < _NOTICED
        if not (is_named or is_usual or is_short):
            if loader.bound == "Python" and timing.busy is not None:  # of no use where something in that time has a name
                lost = min([lost, *(step.lost - 1 for step in steps if step.lost >= _LARGE * timing.wall)])
            steps.append(_Step(loader.sentence, lost))
    steps.sort(key=lambda step: (step.rank is None, step.rank or (), -step.lost))
    if steps or loader is None:
        return tuple(step.sentence for step in steps[:_MOST])
    if is_usual:
        step, gain = timing.step or 1, loader.gain or 0
        waits = f"waiting for data costs {format_time(gain)} of each batch's {format_time(step)} ({gain / step:.0%})"
        return (f"nothing stands out; {waits}, and no setting is known to shorten it{_largest_parts(timing)}",)
    joint = "; the verdict is " if loader.bound == "unknown" else " in so short a fit; " if is_short else ": "
    return (f"nothing stands out{joint}{loader.sentence}{_largest_parts(timing)}",)


def _lost(finding: FitFinding, timing: Timing) -> int:
    """Return the nanoseconds of the whole fit that a finding costs."""
    return finding.total if finding.total is not None else timing.of_fit(finding.time or 0)


def _is_worth_it(finding: FitFinding, timing: Timing) -> bool:
    if finding.kind in _COPIES:
        is_large = (finding.nbytes or 0) >= _MUCH_MEMORY
    elif finding.kind in _STAYS:
        is_large = (finding.nbytes or 0) >= _SOME_MEMORY
    elif finding.kind in _GROWS:
        is_large = (finding.nbytes or 0) * timing.batches >= _SOME_MEMORY or (finding.total or 0) >= _WORTH * timing.wall
    elif finding.total is not None:
        is_large = finding.total >= _WORTH * timing.wall
    else:
        is_large = finding.kind in _UNCOUNTED or (finding.time or 0) >= _WORTH * (timing.step or 0)
    return finding.severity == "advice" and is_large


def _step(finding: FitFinding, timing: Timing) -> _Step:
    lost, gain = _lost(finding, timing), ""
    if finding.severity == "advice" and finding.time:
        per = "of each" if finding.time <= (timing.step or 0) else "per"  # more than a batch of this rank: of a slower one
        most = "at least" if finding.kind in _COSTS_LATER else "up to"
        gain = f" ({most} {format_time(finding.time)} {per} batch, {format_time(lost)} of the fit)"
    elif finding.severity == "advice" and lost:
        gain = f" ({lost / (timing.wall or 1):.0%} of the fit)"
    if finding.kind in (*_COSTS_LATER, *_COPIES):
        lost = max(lost, round(_AS_TIME * timing.wall))
    is_problem = finding.severity == "problem"
    if finding.kind in _GROWS:
        is_problem &= (finding.nbytes or 0) * timing.batches >= _MUCH_MEMORY
        lost = max(lost, round(_AS_TIME * timing.wall))
    return _Step(finding.what + ": " + finding.change + gain, lost, finding.rank if is_problem else None)


def _largest_parts(timing: Timing) -> str:
    """Return the largest parts of the wall time in words: validation, code around the batches and nbguard are one part each."""
    parts: dict[str, int] = {}
    usual: dict[str, int] = {}
    for row in timing.rows:
        name = row.phase if row.phase == OWN else _GROUPS[row.group] or row.phase
        parts[name] = parts.get(name, 0) + row.total
        if row.group == "batch" and row.median:
            usual[name] = row.median
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_MOST]
    words = [
        f"{total / timing.wall:.0%} {name}{_in_few_batches(total, usual.get(name), timing)}"
        for name, total in largest
        if total >= _NAMED * (timing.wall or 1)
    ]
    return f". Of the fit's {format_time(timing.wall)}: {', '.join(words)}" if words else ""


def _in_few_batches(total: int, median: int | None, timing: Timing) -> str:
    """Return a word on a part that takes its time in few batches: the first of all, as a rule."""
    if median is None or not timing.is_in_few(total, median):
        return ""
    return f" ({format_time(median)} in most batches, the rest in a few)"


# --- Changes that would save memory or time, only where the fit gives a reason, and never with a guessed figure.


_TIGHT = 0.8
"""Of a device's memory: from such a peak on, memory is worth saving."""
_NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyContext:
    """The observations that speak for one remedy or another. Bytes are None where they were not counted."""

    has_device: bool  # CUDA was in use
    peak: int | None = None  # bytes of memory
    capacity: int | None = None  # bytes of the device
    gradients: int = 0  # bytes of gradients that are cleared in place
    activations: int | None = None  # bytes at the peak
    clears_in_place: bool = False  # gradients are filled with zeros and stay
    is_own: bool = False  # by an optimizer of the library's own
    is_learners: bool = False  # a fit of a Learner
    dtype: str = "float32"  # of the training batches' forward passes
    batch_size: int | None = None  # of the first input of the first training batch
    convolves: bool = False  # the model has two-dimensional convolutions
    is_channels_last: bool = False  # and their weights are laid out so

    @property
    def is_tight(self) -> bool:
        """Say whether memory is short."""
        return self.peak is not None and self.capacity is not None and self.peak >= _TIGHT * self.capacity


def remedy_context(
    optimizers: OptimizersFacts,
    amp: AmpFacts,
    switches: SwitchFacts,
    memory: MemoryReport | None = None,
    *,
    is_learners: bool = False,
) -> RemedyContext:
    """Return the observations of several instruments together."""
    in_place = [optimizer for optimizer in optimizers.optimizers if optimizer.is_learners or optimizer.cleared_in_place]
    categories = {} if memory is None else {category.name: category.nbytes for category in memory.categories}
    dtypes = [dtype for dtype in ("float16", "bfloat16") if amp.in_dtype(dtype)]
    return RemedyContext(
        has_device=switches.has_device,
        peak=None if memory is None else memory.peak,
        capacity=None if memory is None else memory.capacity,
        gradients=sum(optimizer.gradient_bytes for optimizer in in_place),
        activations=categories.get("activations"),
        clears_in_place=bool(in_place),
        is_own=any(optimizer.is_learners for optimizer in in_place),
        is_learners=is_learners,
        dtype=dtypes[0] if dtypes else "float32",
        batch_size=switches.batch_size,
        convolves=switches.convolves,
        is_channels_last=switches.is_channels_last,
    )


def remedies(facts: RemedyContext) -> tuple[Remedy, ...]:
    """Return the remedies that fit a fit, measured ones first."""
    if not facts.has_device and not facts.is_tight:
        return ()
    fitting = [*_set_to_none(facts), *_precision(facts), *_layout(facts)]
    if facts.is_tight:
        fitting += [*_batch(facts), *_checkpointing(facts)]
    return tuple(sorted(fitting, key=lambda remedy: not remedy.measured))


def _set_to_none(facts: RemedyContext) -> Iterator[Remedy]:
    if facts.clears_in_place and facts.gradients >= MiB:
        held = format_bytes(facts.gradients)
        yield Remedy(
            name="set_to_none",
            effect=f"{held} of gradients are free during the forward pass; the peak falls by at most that",
            measured=True,
            change=setting("clear gradients") if facts.is_own else "`optimizer.zero_grad(set_to_none=True)`",
            nbytes=facts.gradients,
        )


def _precision(facts: RemedyContext) -> Iterator[Remedy]:
    if facts.has_device and facts.dtype == "float32":
        half = "" if facts.activations is None else f", up to half of the {format_bytes(facts.activations)} of activations"
        of_loop = "`torch.autocast('cuda', dtype=torch.bfloat16)` around model and loss"
        yield Remedy(
            name="mixed precision",
            effect=f"less memory{half}, and less time on tensor cores: {_NOT_MEASURED}",
            measured=False,
            change="`learn.to_fp16()`" if facts.is_learners else of_loop,
        )


def _layout(facts: RemedyContext) -> Iterator[Remedy]:
    if facts.has_device and facts.convolves and not facts.is_channels_last and facts.dtype != "float32":
        change = "`model.to(memory_format=torch.channels_last)`, and the same for the inputs"
        yield Remedy(
            name="channels_last", effect=f"faster convolutions in {facts.dtype}: {_NOT_MEASURED}", measured=False, change=change
        )


def _batch(facts: RemedyContext) -> Iterator[Remedy]:
    size, activations = facts.batch_size, facts.activations
    if size is None or size < 2:
        return
    less = "less memory" if activations is None else f"about half of the {format_bytes(activations)} of activations"
    change = f"`bs={size // 2}`; with two batches per step{in_own_words('accumulate', size=size)} the step sees as much"
    yield Remedy(
        name="smaller batch, gradient accumulation",
        kind="smaller batch",
        effect=f"{less}, and more steps: {_NOT_MEASURED}",
        measured=False,
        change=change,
    )


def _checkpointing(facts: RemedyContext) -> Iterator[Remedy]:
    held = "" if facts.activations is None else f" of {format_bytes(facts.activations)}"
    change = "`torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` around the largest blocks"
    yield Remedy(
        name="checkpointing",
        kind="checkpointing",
        effect=f"most of the activations{held} for a second forward pass: {_NOT_MEASURED}",
        measured=False,
        change=change,
    )


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
class OwnTime:
    """The processor time that the profile took where it is measured, in nanoseconds, and the time of the process meanwhile."""

    before: int = 0  # to import nbguard's modules and to begin
    events: int = 0  # at events of the fit
    after: int = 0  # to end and to make the report
    process: int = 0  # of the process between both, the fit's with `events`; 0 where it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class FitObservations:
    """One profile as its instruments saw it. Times are nanoseconds, sizes are bytes; no object of the user's is in it."""

    title: str = ""  # of the cell, e.g. "In[7]"; "" in a script
    ending: Ending = "complete"  # how the fit ended
    error: str = ""  # the type of the exception that ended the fit, e.g. "KeyboardInterrupt"; "" if none did
    failure: Failure = ""  # the cause of that exception, where it is one of those known
    log: Annotated[PhaseLog, unpack_log] = field(metadata={"plain": pack_log})  # phases, with the boundaries of batches
    mark_cost: int = 0  # nanoseconds that one mark of the log costs the fit, with its share of the other work in each batch
    own: OwnTime = field(default_factory=OwnTime)  # processor time of the profile itself
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
            data = read_json(text)
        except ValueError:
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
