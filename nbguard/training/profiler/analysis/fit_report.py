"""The report of a fit, as a pure function of its observations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.compare import FitSamples, compare, fit_samples
from nbguard.training.profiler.analysis.loader.advice import starting_less
from nbguard.training.profiler.analysis.loader.slowest import LoaderFacts, profiling_time, training_loader
from nbguard.training.profiler.analysis.loader.verdict import LoaderRun, WorkerTuning, verdict, without_tried
from nbguard.training.profiler.analysis.memory import growth
from nbguard.training.profiler.analysis.memory.growth import CUDA, memory_report, unfrozen_finding
from nbguard.training.profiler.analysis.memory.recorded_batch import passing_finding
from nbguard.training.profiler.analysis.observations import FitObservations, first_steps, remedies, remedy_context
from nbguard.training.profiler.analysis.operators import operator_table
from nbguard.training.profiler.analysis.ranks import rank_report
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
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batches, divide, slow_callbacks
from nbguard.training.profiler.analysis.time.gpu import GpuFacts, gpu_facts
from nbguard.training.profiler.analysis.time.hot_code import HotCode, hot_code, library_share, without_models_work
from nbguard.training.profiler.analysis.time.lost_time import lost_time
from nbguard.training.profiler.analysis.time.timing import slowing, steady_batches, timing_of
from nbguard.training.profiler.analysis.untrained import health
from nbguard.training.profiler.checks.amp import AmpFacts, scale_settings
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.checks.compiles import CompileFacts
from nbguard.training.profiler.checks.optimizer_facts import OptimizersFacts, faster_step
from nbguard.training.profiler.checks.switches import SwitchFacts
from nbguard.training.profiler.checks.syncs import SyncFacts, copied_time, reading_loops
from nbguard.units import counted

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
        return growth.growth_finding(self.memory.growth)

    @cached_property
    def hot_code(self) -> tuple[HotCode, ...]:
        """Return the code that time goes to besides the model's own work, by name."""
        code = hot_code(self.observations.stacks, self.batches, self.timing.rows)
        return without_models_work(code, reading_loops(self.observations.of(SyncFacts)))

    @property
    def may_keep_graphs(self) -> bool:
        """Say whether it is worth looking for names that keep graphs: batches enough, signs of it, and none known already."""
        is_known = self.growth_finding is not None and self.growth_finding.kind == "graph"
        if self.timing.batches < growth.ENOUGH or is_known:
            return False
        memory = self.observations.memory
        return isinstance(memory, Unavailable) or growth.may_keep_graphs(memory.samples, memory.living_losses)

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
        graphs = tuple(growth.graph_findings(observed.kept_graphs, timing.batches)) if self.may_keep_graphs else ()
        yield from growth.with_growth(
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

        Parts with a finding of their own are left out: the start of workers, where the advice on loaders speaks of it, and
        batches that are long as code is compiled again in them.
        """
        compiled = sum(code.again for code in self.observations.of(CompileFacts).codes)
        observed, is_said = self.observations, any(finding.kind in _ON_STARTS for finding in self.loader.advice)
        for finding in lost_time(self.timing, self.batches, observed.library_callbacks, self.hot_code, observed.stacks):
            if finding.kind == "stall" and 2 * compiled >= (finding.total or 0):
                continue
            if finding.kind != "workers start":
                yield finding
            elif not is_said:
                yield replace(finding, change=starting_less(observed.loaders))

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
