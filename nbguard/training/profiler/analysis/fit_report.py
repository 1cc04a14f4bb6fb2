"""The report of a fit, as a pure function of its observations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler import checks as fit_checks
from nbguard.training.profiler.analysis import memory_growth
from nbguard.training.profiler.analysis.compare import FitSamples, compare, fit_samples
from nbguard.training.profiler.analysis.loader_advice import starting_less
from nbguard.training.profiler.analysis.loader_verdict import LoaderRun, WorkerTuning, verdict, without_tried
from nbguard.training.profiler.analysis.memory_growth import CUDA, memory_report, unfrozen_finding
from nbguard.training.profiler.analysis.nonfinite import FiniteFacts, nan_findings
from nbguard.training.profiler.analysis.observations import FitObservations, first_steps, remedies, remedy_context
from nbguard.training.profiler.analysis.operators import operator_table
from nbguard.training.profiler.analysis.ranks import rank_report
from nbguard.training.profiler.analysis.recorded_batch import passing_finding
from nbguard.training.profiler.analysis.report import (
    Comparison,
    Ending,
    FitFinding,
    FitReport,
    LoaderVerdict,
    MemoryReport,
    Overhead,
    RankRow,
    Setting,
    Timing,
    gravest_first,
)
from nbguard.training.profiler.analysis.slowest import LoaderFacts, profiling_time, training_loader
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batches, divide, slow_callbacks, slowing, steady_batches, timing_of
from nbguard.training.profiler.analysis.time.gpu import GpuFacts, gpu_facts
from nbguard.training.profiler.analysis.time.hot_code import HotCode, hot_code, library_share, without_models_work
from nbguard.training.profiler.analysis.time.lost_time import lost_time
from nbguard.training.profiler.checks.amp import AmpFacts, amp_findings, consequences, scale_settings
from nbguard.training.profiler.checks.check import FitFigures, facts_of
from nbguard.training.profiler.checks.compiles import CompileFacts
from nbguard.training.profiler.checks.optimizer_facts import OptimizerFacts, OptimizersFacts, faster_step, optimizer_findings
from nbguard.training.profiler.checks.switches import SwitchFacts
from nbguard.training.profiler.checks.syncs import SyncFacts, copied_time, reading_loops
from nbguard.units import counted

# --- Findings on fits that train nothing or only a part


_LOOKS = 2
"""At gradients before steps; the second comes at the second step."""
_UNCHANGED = 5
"""Looks without a change: the fifth comes at step 16."""
_STEPS = 16
_MUCH = 0.25
"""Share of the batches that a fit goes on with a learning rate that is too small."""
_OFTEN = 0.5
"""Least steps per batch of schedulers that step per batch."""
_SHOWN = 3


def untrained_findings(facts: OptimizersFacts, *, is_scaled: bool = False) -> tuple[FitFinding, ...]:
    """Return the reasons why nothing is trained, one for each optimizer. `is_scaled`: a GradScaler may leave steps out."""
    return tuple(finding for optimizer in facts.optimizers for finding in _first(optimizer, facts, is_scaled))


def _first(optimizer: OptimizerFacts, facts: OptimizersFacts, is_scaled: bool) -> Iterator[FitFinding]:
    """Yield the gravest reason."""
    for reason in (_without_gradients, _left_behind, _replaced, _frozen, _rate, *(() if is_scaled else (_unchanged,))):
        found = reason(optimizer, facts)
        if found is not None:
            yield found
            return


def _finding(what: str, evidence: str, change: str) -> FitFinding:
    return FitFinding(kind="not trained", severity="problem", what=what, evidence=evidence, change=change)


def _make(optimizer: OptimizerFacts) -> str:
    return f"`{optimizer.name}(model.parameters(), …)`" if not optimizer.is_learners else "the Learner"


def _without_gradients(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on an optimizer without gradients for any of its parameters."""
    without = len(optimizer.without_gradients) + optimizer.foreign
    if optimizer.looks < _LOOKS or not optimizer.trainable or without < optimizer.trainable:
        return None
    count = counted(without, "parameter")
    if optimizer.emptied * 2 > optimizer.steps:
        return _finding(
            f"{optimizer.name} trains nothing because `zero_grad` runs between the backward pass and the step",
            f"at {optimizer.emptied} of {counted(optimizer.steps, 'step')} its {count} no longer had a gradient",
            "`optimizer.zero_grad()` before `loss.backward()`, or after the step",
        )
    if optimizer.foreign == optimizer.trainable:
        others = f"; gradients reached {_shown(facts.untaught)}, which no optimizer has" if facts.untaught else ""
        return _finding(
            f"{optimizer.name} trains nothing: none of its {count} is in a model that ran",
            f"none of them had a gradient at any step of this fit{others}; a model or layer was recreated after the optimizer",
            f"make the optimizer after the model and its layers: {_make(optimizer)}",
        )
    return _finding(
        f"{optimizer.name} trains nothing: none of its {count} ever gets a gradient",
        f"{counted(optimizer.steps, 'step')} seen, and the loss does not depend on {_shown(optimizer.without_gradients)}",
        "look for `.detach()`, `.data`, `.item()`, NumPy or `torch.no_grad()` between the model and the loss",
    )


def _left_behind(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on an optimizer that has trained a model, and goes on to step where another one runs."""
    if not optimizer.left or optimizer.left < optimizer.trainable or not facts.untaught:
        return None
    return _finding(
        f"{optimizer.name} no longer trains anything; none of its {counted(optimizer.left, 'parameter')} is in the model that "
        "runs now",
        f"they belong to the previous model; gradients reached {_shown(facts.untaught)}, which no optimizer has",
        f"make the optimizer after the model and its layers: {_make(optimizer)}",
    )


def _replaced(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on a part of a model that was replaced after the optimizer was made."""
    unused, gone = facts.unused, optimizer.foreign + optimizer.left
    if optimizer.looks < _LOOKS or not gone or unused is None:
        return None
    since = "that never got a gradient" if optimizer.foreign else "that no longer get a gradient"
    return _finding(
        f"{_shown(unused.parameters)} {'is' if len(unused.parameters) == 1 else 'are'} not trained: the optimizer was made "
        "before that layer",
        f"{counted(len(unused.parameters), 'parameter')} with gradients in no optimizer; {optimizer.name} has "
        f"{gone} that no model has and {since}",
        f"make the optimizer after the last change to the model: {_make(optimizer)}",
    )


def _frozen(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on an optimizer that steps though all its parameters are frozen.

    Where another one trains they may be frozen on purpose; then this one is not needed.
    """
    if optimizer.looks < _LOOKS or optimizer.trainable or not optimizer.parameters:
        return None
    if any(other.trainable for other in facts.optimizers):
        found = _finding(
            f"{optimizer.name} trains nothing: {counted(optimizer.parameters, 'parameter')}, all frozen",
            f"`requires_grad` was False for all of them whenever they were checked, and it steps; "
            f"{', '.join(sorted({other.name for other in facts.optimizers if other.trainable}))} trains others",
            "`requires_grad_(True)` for that part if it should learn; otherwise remove its optimizer",
        )
        return replace(found, kind="frozen", severity="advice")
    others = f"; gradients reached {_shown(facts.untaught)}, which no optimizer has" if facts.untaught else ""
    return _finding(
        f"{optimizer.name} trains nothing: {counted(optimizer.parameters, 'parameter')}, all frozen",
        f"`requires_grad` is False for all of them{others}",
        "`model.requires_grad_(True)`, or only for the part that should learn",
    )


def _rate(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on a learning rate that is 0, or has become too small long before the end."""
    rate = optimizer.rate
    if rate is None or rate.steps < _STEPS:
        return None
    if not rate.highest:
        return _finding(
            f"{optimizer.name} trains nothing: its learning rate is 0",
            f"at all {rate.steps} sampled steps",
            f"`{optimizer.name}(…, lr=1e-3)`, or another rate" if not optimizer.is_learners else "`learn.fit(1, 1e-3)`",
        )
    by_batch = [name for name, calls in facts.schedulers if calls >= _OFTEN * facts.losses]
    small = rate.small if by_batch else rate.negligible
    if small < _MUCH * rate.batches:
        return None
    if by_batch:
        change = f"`scheduler.step()` once per epoch, or settings of `{by_batch[0]}` that count batches"
        evidence = f"`{by_batch[0]}.step()` was called {dict(facts.schedulers)[by_batch[0]]} times for {facts.losses} losses"
    else:
        change, evidence = "check the learning rate schedule", f"the highest was {rate.highest:g}"
    return _finding(
        f"the learning rate falls from {rate.highest:g} to {rate.last:.2g}: {small} of {rate.batches} batches train nothing",
        evidence,
        change,
    )


def _unchanged(optimizer: OptimizerFacts, facts: OptimizersFacts) -> FitFinding | None:
    """Return the finding on steps that change nothing, for whatever reason: of one optimizer alone a dead layer may be it."""
    if not optimizer.steps or optimizer.unchanged < _UNCHANGED or any(other.changed for other in facts.optimizers):
        return None
    rate = "" if optimizer.rate is None else f", with a learning rate of {optimizer.rate.last:g}"
    if optimizer.emptied * 2 > optimizer.steps:
        change = "`optimizer.zero_grad()` before `loss.backward()`, or after the step"
        cause = " because `zero_grad` runs between the backward pass and the step"
    else:
        change, cause = (
            "look for gradients that are all 0, and for a learning rate that is too small for the parameters' dtype",
            "",
        )
    return _finding(
        f"{optimizer.name} trains nothing: its steps change no value{cause}",
        f"compared before and after {optimizer.unchanged} steps{rate}",
        change,
    )


def _shown(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + more


# --- The health of a fit, with the findings of all checks, the worst first.


_NOT_FINITE = ("nan", "data")
"""Kinds of findings on values that make a GradScaler skip steps and lowers its scale."""


def health(finite: FiniteFacts, checks: Collection[object], fit: FitFigures) -> tuple[FitFinding, ...]:
    """Return the findings of all checks, from their facts: those on values, scales and optimizers first."""
    of_values = tuple(_of_values(finite, facts_of(checks, AmpFacts), facts_of(checks, OptimizersFacts), fit.times))
    fit = replace(fit, kinds=frozenset(finding.kind for finding in of_values))
    others = (finding for check in fit_checks.CHECKS for finding in check.diagnose(facts_of(checks, check.facts), fit))
    return gravest_first((*of_values, *others))


def _of_values(
    finite: FiniteFacts, amp: AmpFacts, optimizers: OptimizersFacts, times: Mapping[str, int]
) -> Iterator[FitFinding]:
    broken = _broken(finite, amp, optimizers, times)
    nan = next((finding for finding in broken if finding.kind in _NOT_FINITE and finding.severity == "problem"), None)
    made_by = None if nan is not None or finite.course.scaled is None else finite.course.scaled.operation
    of_scales = amp_findings(amp, nan, len(optimizers.optimizers), made_by)
    if nan is not None and any(nan.what in finding.what for finding in of_scales):
        broken = tuple(finding for finding in broken if finding is not nan)  # it is said as the cause
    elif nan is not None and (followed := consequences(amp)):
        said = replace(nan, evidence=nan.evidence + f"; from then on {followed}")
        broken = tuple(said if finding is nan else finding for finding in broken)
    yield from (finding for finding in of_scales if finding.kind == "not trained")
    yield from broken
    yield from (finding for finding in of_scales if finding.kind != "not trained")


def _broken(
    finite: FiniteFacts, amp: AmpFacts, optimizers: OptimizersFacts, times: Mapping[str, int]
) -> tuple[FitFinding, ...]:
    """Return NaN and the mistakes with optimizers. An eps of 0 that breaks a parameter comes before the NaN that it makes."""
    scale = max((scaler.initial for scaler in amp.scalers), default=None)
    nan = nan_findings(finite, scale, in_float16=bool(amp.in_dtype("float16")))
    mistakes = optimizer_findings(optimizers, is_scaled=bool(amp.scalers), times=times)
    is_by_step = finite.first is not None and finite.first.origin.kind == "step"
    mistakes = (*untrained_findings(optimizers, is_scaled=bool(amp.scalers)), *mistakes)
    causes = tuple(finding for finding in mistakes if finding.kind == "eps" and is_by_step)
    return (*causes, *nan, *(finding for finding in mistakes if finding not in causes))


# --- fit report


_ON_STARTS = ("persistent_workers", "needless workers")
"""Kinds of advice on loaders that speak of the cost of starting workers."""


def build_fit_report(observations: FitObservations) -> FitReport:
    """Return the report of a fit."""
    return FitAnalysis(observations).report


class FitAnalysis:
    """Everything that follows from the observations of a fit. Each part is computed once, when it is first asked for."""

    def __init__(self, observations: FitObservations, batches: Batches | None = None) -> None:
        """`batches`: of the same log, if it has been divided already."""
        self.observations = observations
        self._given_batches = batches

    def with_more(self, more: FitObservations) -> FitAnalysis:
        """Return the analysis of the same log with `more` observations: those that are made once the fit is analysed."""
        return FitAnalysis(more, self.batches)

    @cached_property
    def batches(self) -> Batches:
        """Return the log divided into batches."""
        return self._given_batches or divide(self.observations.log, self.observations.stacks.moments)

    @cached_property
    def memory(self) -> MemoryReport | None:
        """Return the report on memory; None where it could not be followed."""
        observed = self.observations.memory
        return None if isinstance(observed, Unavailable) else memory_report(observed)

    @cached_property
    def timing(self) -> Timing:
        """Return where the time went, with the GPU's own times where the fit ran on one."""
        timing, observed = timing_of(self.batches), self.observations.gpu
        if not self.has_gpu:
            return timing
        return replace(_with_gpu(timing, gpu_facts(observed.marks, observed.used, observed.why_not)), gpu=observed.name)

    @property
    def has_gpu(self) -> bool:
        """Say whether the fit ran on a GPU."""
        return self.memory is not None and self.memory.source == CUDA

    @cached_property
    def ending(self) -> Ending:
        """Return how the fit ended. A Learner takes a stop at NaN for a fit that was cancelled, and so for a complete one."""
        first = self.observations.finite.first
        return "stopped at NaN" if first is not None and first.has_stopped else self.observations.ending

    @cached_property
    def loader(self) -> LoaderVerdict:
        """Return the verdict on the loader, with the trials of other numbers of workers if these were made.

        Advice that the same fit has followed before and that did not help is not given again.
        """
        found, run = self._verdict, self._run()
        if run is None:
            return found
        return replace(found, advice=tuple(without_tried(found.advice, run, self.observations.tried)))

    @property
    def loader_run(self) -> LoaderRun | None:
        """Return how the loader was set up in this run, with the advice on it; None where no epoch was seen."""
        run = self._run()
        return run and replace(run, advised=tuple(each.change for each in self.loader.advice if each.severity == "advice"))

    def _run(self) -> LoaderRun | None:
        loader = training_loader(self.observations.loaders)
        epochs = [epoch for epoch in self.timing.epochs if epoch.is_training and epoch.batches]
        if loader is None or not epochs:
            return None
        most = max(epoch.batches for epoch in epochs)
        whole = [epoch.total for epoch in epochs if epoch.batches == most]
        names = (self.observations.subject.title, loader.dataset, str(loader.batch_size), str(most))
        return LoaderRun(
            fit=" · ".join(names),
            num_workers=loader.workers,
            persistent_workers=loader.persistent,
            prefetch_factor=loader.prefetch,
            epoch=min(whole),
            epochs=len(epochs),
        )

    @cached_property
    def _verdict(self) -> LoaderVerdict:
        """Return the verdict on the loader from this run alone."""
        observed = self.observations
        sentence = verdict(
            self.timing,
            observed.loaders,
            observed.cores,
            self.has_gpu,
            library_share(self.hot_code, self.timing),
            copied_time(observed.of(SyncFacts)),
            is_compiled=observed.subject.is_compiled,
            faster_step=faster_step(observed.of(OptimizersFacts)),
        )
        tuning = observed.tuning
        if tuning is None:
            return sentence
        advice = _with_trials(sentence.advice, tuning, training_loader(observed.loaders))
        return replace(
            sentence, trials=tuning.trials, best=tuning.best, tuning=tuning.sentence, storage=tuning.storage, advice=advice
        )

    @cached_property
    def growth_finding(self) -> FitFinding | None:
        """Return the finding on memory that grows, if it does."""
        if self.memory is None or self.memory.growth is None:
            return None
        return memory_growth.growth_finding(self.memory.growth)

    @cached_property
    def hot_code(self) -> tuple[HotCode, ...]:
        """Return the code that time goes to besides the model's own work, by name."""
        code = hot_code(self.observations.stacks, self.batches, self.timing.rows)
        return without_models_work(code, reading_loops(self.observations.of(SyncFacts)))

    @property
    def may_keep_graphs(self) -> bool:
        """Say whether it is worth looking for names that keep graphs: batches enough, signs of it, and none known already."""
        is_known = self.growth_finding is not None and self.growth_finding.kind == "graph"
        if self.timing.batches < memory_growth.ENOUGH or is_known:
            return False
        memory = self.observations.memory
        return isinstance(memory, Unavailable) or memory_growth.may_keep_graphs(memory.samples, memory.living_losses)

    @cached_property
    def report(self) -> FitReport:
        """Return the whole report."""
        observed, timing = self.observations, self.timing
        findings = gravest_first(self._findings())
        ranks = None if observed.ranks is None else rank_report(observed.ranks)
        advice = (*findings, *self.loader.advice, *(ranks.findings if ranks else ()))
        amp, switches = observed.of(AmpFacts), observed.of(SwitchFacts)
        context = remedy_context(
            observed.of(OptimizersFacts), amp, switches, self.memory, is_learners=observed.subject.is_learners
        )
        return FitReport(
            title=self._title,
            ending=self.ending,
            error=observed.error,
            timing=timing,
            overhead=self.overhead(timing),
            first=first_steps(timing, self.loader, advice),
            loader=self.loader,
            memory=observed.memory if isinstance(observed.memory, Unavailable) else self.memory,
            findings=findings,
            remedies=remedies(context),
            settings=(*switches.settings, *scale_settings(amp)),
            ranks=ranks,
            operators=operator_table(observed.operators),
            comparison=self._comparison,
            notes=(*observed.mistakes, *self._missed()),
            missed=observed.subject.missed,
            scaled_steps=sum(scaler.updates for scaler in amp.scalers),
            skipped_steps=sum(len(scaler.skipped) for scaler in amp.scalers),
            earlier=tuple(map(build_fit_report, observed.earlier)),
            record=observed.record,
        )

    @cached_property
    def samples(self) -> FitSamples:
        """Return the figures of this fit that a later one can be compared with."""
        steady = steady_batches(self.batches)
        return fit_samples(
            self._title,
            self.timing.batches,
            [batch.step for batch in steady],
            {phase: [batch.times.get(phase, 0) for batch in steady] for phase in self.timing.medians},
            self.memory.peak if self.memory else None,
            self._settings(),
        )

    @property
    def rank_row(self) -> RankRow:
        """Return this process as one rank of several. Its number, host and process are filled in by the exchange."""
        timing, memory, error = self.timing, self.memory, self.observations.error
        return RankRow(
            rank=0,
            host="",
            pid=0,
            state=self.ending if not error or self.ending == "complete" else f"{self.ending}: {error}",
            batches=timing.batches,
            step=timing.step,
            wait=timing.medians.get(phase_log.WAIT, 0),
            backward=timing.medians.get(phase_log.BACKWARD, 0),
            peak=memory.peak if memory else None,
            device=memory.device if memory else "",
        )

    @property
    def _title(self) -> str:
        return " · ".join(filter(None, (self.observations.title, self.observations.subject.title)))

    def overhead(self, timing: Timing) -> Overhead:
        """Return the cost of the profile: before and after the fit, of the log with the work in each batch, and of samples."""
        observed, own = self.observations, self.observations.own
        watching = (own.events if own.process else timing.own) + observed.stacks.took
        watching += sum(profiling_time(loader) for loader in observed.loaders)
        cost = Overhead(
            per_mark=observed.mark_cost,
            marks=len(observed.log.codes),
            watching=watching,
            share=0.0,
            before=own.before,
            after=own.after,
        )
        fit = own.process - cost.during if own.process else timing.wall  # the latter: in a file of an earlier version
        return replace(cost, share=cost.total / max(fit, 1))

    @property
    def _comparison(self) -> Comparison | None:
        if not self.observations.is_compared or not self.timing.batches:
            return None
        before = self.observations.before
        return Comparison("there is no earlier run to compare with") if before is None else compare(self.samples, before)

    def _findings(self) -> Iterator[FitFinding]:
        observed, timing = self.observations, self.timing
        graphs = tuple(memory_growth.graph_findings(observed.kept_graphs, timing.batches)) if self.may_keep_graphs else ()
        yield from memory_growth.with_growth(
            graphs, None if self.memory is None else self.memory.growth, slowing(self.batches, observed.stacks)
        )
        if not isinstance(observed.memory, Unavailable):
            yield from unfrozen_finding(observed.memory.unfrozen, observed.memory.peak)
            yield from passing_finding(observed.memory.recorded)
        yield from slow_callbacks(timing, observed.library_callbacks)
        yield from self._failure()
        yield from self._lost_time()
        figures = FitFigures(wall=timing.wall, step=timing.step, gainable=timing.gainable, times=timing.medians)
        yield from health(observed.finite, observed.checks.values(), figures)

    def _failure(self) -> Iterator[FitFinding]:
        """Yield the cause of the error that ended the fit, where it is known."""
        if self.observations.failure != "batch norm of one":
            return
        loader = training_loader(self.observations.loaders)
        larger = loader is not None and loader.batch_size == 1
        yield FitFinding(
            kind="failure",
            severity="problem",
            what="the fit failed at a batch of one item: batch norm needs more, to take their mean and variance",
            evidence="each channel had one value in that batch"
            + ("" if larger else ", which is what the batch size leaves over at the end of an epoch, as a rule"),
            change="`batch_size=2` or more" if larger else "`DataLoader(…, drop_last=True)` of the training batches",
        )

    def _lost_time(self) -> Iterator[FitFinding]:
        """Yield the parts that take much time.

        Parts with a finding of their own are left out: the start of workers, where the advice on loaders speaks of it or the
        fit needs them, and batches that are long as code is compiled again in them.
        """
        compiled = sum(code.again for code in self.observations.of(CompileFacts).codes)
        observed, is_said = self.observations, any(finding.kind in _ON_STARTS for finding in self.loader.advice)
        for finding in lost_time(self.timing, self.batches, observed.library_callbacks, self.hot_code, observed.stacks):
            if finding.kind == "stall" and 2 * compiled >= (finding.total or 0):
                continue
            if finding.kind != "workers start":
                yield finding
            elif not is_said and (change := starting_less(observed.loaders, is_waiting=self.loader.bound == "data")):
                yield replace(finding, change=change)

    def _settings(self) -> Iterator[Setting]:
        training = training_loader(self.observations.loaders)
        if training is not None:
            yield Setting("batch size", str(training.batch_size or "?"))
            yield Setting("workers", str(training.workers))
        if self.memory is not None:
            yield Setting("device", self.memory.device)

    def _missed(self) -> Iterator[str]:
        """Yield, in words, the parts of the fit that the profile has not seen."""
        missed = self.observations.subject.missed
        if missed:
            yield f"the loop ran {counted(missed, 'batch', 'batches')} before the profile began; they are not counted here"
        if self.observations.has_other_threads:
            yield "another thread also asked a loader for batches, but a profile follows only the thread that started it"


def _with_trials(advice: tuple[FitFinding, ...], tuning: WorkerTuning, loader: LoaderFacts | None) -> tuple[FitFinding, ...]:
    """Return advice on loaders with the result of the trials; none on workers where they favour the present number."""
    if tuning.best is None:
        return advice
    if loader is not None and tuning.best == loader.workers:
        return tuple(finding for finding in advice if finding.kind != "workers")
    change = f"`num_workers={tuning.best}`, which the trials speak for"
    return tuple(replace(finding, change=change) if finding.kind == "workers" else finding for finding in advice)


def _with_gpu(timing: Timing, gpu: GpuFacts) -> Timing:
    medians = dict(gpu.phases)
    rows = tuple(replace(row, gpu=medians.get(row.phase)) if row.group == "batch" else row for row in timing.rows)
    return replace(timing, rows=rows, busy=gpu.busy, busy_note=gpu.note)
