"""The report of a fit, made of its log and of what the parts around it have seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nbguard.memory.facts import Unavailable
from nbguard.profiler.analysis.first_steps import first_steps
from nbguard.profiler.analysis.health.health import health
from nbguard.profiler.analysis.loader.fetches import training_loader
from nbguard.profiler.analysis.loader.verdict import verdict
from nbguard.profiler.analysis.memory.growth import growth_finding
from nbguard.profiler.analysis.remedies import remedies, remedy_context
from nbguard.profiler.analysis.report import (
    Ending,
    FitFinding,
    FitReport,
    LoaderVerdict,
    MemoryReport,
    RankReport,
    RankRow,
    Setting,
    Timing,
)
from nbguard.profiler.analysis.run_record import RunRecord, run_record
from nbguard.profiler.analysis.time import phases
from nbguard.profiler.analysis.time.batches import divide
from nbguard.profiler.analysis.time.callbacks import slow_callbacks
from nbguard.profiler.analysis.time.gpu import GpuFacts
from nbguard.profiler.analysis.time.phase_log import PhaseLog
from nbguard.profiler.analysis.time.timing import steady_batches, timing_of
from nbguard.profiler.instruments.instruments import Instruments
from nbguard.profiler.instruments.loader.loader_facts import usable_cores
from nbguard.profiler.instruments.memory.counters import CudaCounter
from nbguard.profiler.instruments.memory.retained_graphs import graphs_left
from nbguard.profiler.options import FitOptions
from nbguard.profiler.record.overhead import overhead_of


class Making:
    """Makes the report of one fit, once everything around it has been taken down."""

    def __init__(self, watch: Instruments, marks: PhaseLog, options: FitOptions) -> None:
        self._watch = watch
        self._marks = marks
        self._options = options
        self._batches = divide(marks)
        memory = watch.memory.report()
        self._memory = memory if isinstance(memory, MemoryReport) else None
        self._unknown_memory = memory if isinstance(memory, Unavailable) else None
        self._has_gpu = self._memory is not None and self._memory.source == CudaCounter.source
        self._loaders = watch.loaders.report()
        self._switches = watch.switches.facts()
        timing = timing_of(self._batches)
        self._timing = _with_gpu(timing, watch.gpu.report()) if self._has_gpu else timing

    def report(self, ending: Ending, error: str, title: str) -> FitReport:
        """Return the report of a fit that ended in this way."""
        watch, timing, memory = self._watch, self._timing, self._memory
        first = watch.finite.facts().first
        if first is not None and first.has_stopped:
            ending = "stopped at NaN"  # fastai takes that for a fit that was cancelled
        loader = self._loader()
        findings = tuple(self._findings())
        ranks = self._ranks(ending, error)
        advice = (*findings, *loader.advice, *(ranks.findings if ranks else ()))
        facts = remedy_context(watch.optimizers.facts(), watch.amp.facts(), self._switches, memory)
        return FitReport(
            title=" · ".join(filter(None, (title, watch.subject.words))),
            ending=ending,
            error=error,
            timing=timing,
            overhead=overhead_of(self._marks, timing),
            first=first_steps(timing, loader, advice),
            loader=loader,
            memory=memory or self._unknown_memory,
            findings=findings,
            remedies=remedies(facts),
            settings=self._switches.settings,
            ranks=ranks,
            notes=(*watch.failed, *watch.recorder.failed, *self._missed()),
            missed=watch.subject.missed,
        )

    def run(self, report: FitReport) -> RunRecord:
        """Return what is kept of this fit to compare a later one with."""
        steady = steady_batches(self._batches)
        return run_record(
            report.title,
            report.timing.batches,
            [batch.step for batch in steady],
            {phase: [batch.times.get(phase, 0) for batch in steady] for phase in report.timing.medians},
            self._memory.peak if self._memory else None,
            self._settings(),
        )

    def _loader(self) -> LoaderVerdict:
        found = verdict(self._timing, self._loaders, usable_cores(), self._has_gpu)
        if not self._options.tune_workers:
            return found
        from nbguard.profiler.instruments.loader.tune import tune

        step, wait = self._timing.step or 0, self._timing.medians.get(phases.WAIT, 0)
        try:
            trials, best, sentence = tune(self._watch.loaders.loader(), step - wait)
        except KeyboardInterrupt:
            return replace(found, tuning="the trials were interrupted")
        return replace(found, trials=trials, best=best, tuning=sentence)

    def _findings(self) -> Iterator[FitFinding]:
        watch, timing, memory = self._watch, self._timing, self._memory
        grown = growth_finding(memory.growth) if memory is not None and memory.growth is not None else None
        if grown is not None:
            yield grown
        if grown is None or grown.kind != "graph":
            yield from graphs_left(timing.batches)
        yield from slow_callbacks(timing, watch.fastai.callbacks.of_fastai)
        yield from health(
            watch.finite.facts(),
            watch.amp.facts(),
            watch.optimizers.facts(),
            watch.syncs.facts(),
            self._switches,
            timing.step,
        )

    def _ranks(self, ending: Ending, error: str) -> RankReport | None:
        """Return what rank 0 says of all ranks; of a fit of one process, and on the other ranks, None."""
        timing, memory = self._timing, self._memory
        state = ending if not error or ending == "complete" else f"{ending}: {error}"
        return self._watch.ranks.gather(
            RankRow(
                rank=0,
                host="",
                pid=0,
                state=state,
                batches=timing.batches,
                step=timing.step,
                wait=timing.medians.get(phases.WAIT, 0),
                backward=timing.medians.get(phases.BACKWARD, 0),
                peak=memory.peak if memory else None,
                device=memory.device if memory else "",
            )
        )

    def _settings(self) -> Iterator[Setting]:
        training = training_loader(self._loaders)
        if training is not None:
            yield Setting("batch size", str(training.batch_size or "?"))
            yield Setting("workers", str(training.workers))
        if self._memory is not None:
            yield Setting("device", self._memory.device)

    def _missed(self) -> Iterator[str]:
        """Yield, in words, what the profile has not seen."""
        missed = self._watch.subject.missed
        if missed:
            yield f"the loop had given {missed} batches before the profile began: they are not in it"
        if self._watch.recorder.elsewhere:
            yield "another thread asked a loader for batches, too: a profile is of the thread that it began in"


def _with_gpu(timing: Timing, gpu: GpuFacts) -> Timing:
    medians = dict(gpu.phases)
    rows = tuple(replace(row, gpu=medians.get(row.phase)) if row.group == "batch" else row for row in timing.rows)
    return replace(timing, rows=rows, busy=gpu.busy, busy_note=gpu.note)
