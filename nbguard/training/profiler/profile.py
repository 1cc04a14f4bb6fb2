"""A profile from its beginning to its report, whatever ends it, with its files and the last runs of the cells."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time_ns
from typing import Any, TypeVar

from nbguard.errors import NbguardError, StoppedAtNaN
from nbguard.files import check_path
from nbguard.memory.cleanup.apply.interrupts import postponed
from nbguard.memory.scan.pause import keep_garbage
from nbguard.processor_time import thread_time_ns
from nbguard.training.profiler.analysis.compare import FitSamples
from nbguard.training.profiler.analysis.fit_report import FitAnalysis
from nbguard.training.profiler.analysis.loader_verdict import LoaderRun, WorkerTuning
from nbguard.training.profiler.analysis.memory_growth import KeptGraphs, least_kept
from nbguard.training.profiler.analysis.observations import Failure, FitObservations, OwnTime
from nbguard.training.profiler.analysis.report import Ending, FitReport, MemoryReport, Overhead, Timing
from nbguard.training.profiler.analysis.time import phase_log as phases
from nbguard.training.profiler.analysis.time.gpu import trace_events
from nbguard.training.profiler.analysis.time.phase_log import PhaseLog, joined
from nbguard.training.profiler.files import write_json, write_text
from nbguard.training.profiler.instruments.growth_watch import kept_graphs, operations_so_far
from nbguard.training.profiler.instruments.instruments import Instruments
from nbguard.training.profiler.instruments.memory_counters import MemoryCounter
from nbguard.training.profiler.options import FitOptions
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.training.profiler.sinks import open_sink

# --- The files and logs of a profile, checked before the fit, which may take hours, and written after it.


class Outputs:
    """The files and logs that the options of a profile name.

    Raises:
        NbguardError: one of them could not be written.
    """

    def __init__(self, options: FitOptions) -> None:
        self._trace = check_path(options.trace) if options.trace else None
        self._json = check_path(options.json) if options.json else None
        self._save = check_path(options.save) if options.save else None
        self._sinks = [open_sink(spec) for spec in options.logs]
        self.failed: list[str] = []

    def write(self, report: FitReport, observations: FitObservations) -> Iterator[str]:
        """Write everything and yield the places, in words; failures are in `failed`."""
        for place, act in self._acts(report, observations):
            try:
                act()
            except NbguardError as error:
                self.failed.append(str(error))
            else:
                yield place

    def _acts(self, report: FitReport, observations: FitObservations) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each place to write to, and the function that writes there."""
        if self._trace is not None:
            yield str(self._trace), partial(_write_trace, self._trace, report, observations)
        if self._json is not None:
            yield str(self._json), partial(_write_json, self._json, report)
        if self._save is not None:
            yield str(self._save), partial(_write_observations, self._save, observations)
        for sink in self._sinks:
            for each in (*report.earlier, report):
                yield sink.place, partial(sink.write, each)


def _write_trace(path: Path, report: FitReport, observations: FitObservations) -> None:
    points = report.memory.points if isinstance(report.memory, MemoryReport) else ()
    logs = [*(earlier.log for earlier in observations.earlier), observations.log]
    spans = [
        span for each in (*observations.earlier, observations) if each.operators is not None for span in each.operators.spans
    ]
    write_json(path, trace_events(joined(logs), points, report.title, spans))


def _write_observations(path: Path, observations: FitObservations) -> None:
    write_text(path, observations.to_json())


def _write_json(path: Path, report: FitReport) -> None:
    write_json(path, report.to_data())


# --- The last runs of the cells of this process, kept for `--compare last`, and to give no advice again that did not help.
#
# Plain figures: nothing of the user's is held.


_LIMIT = 20

_runs: dict[str, FitSamples] = {}
_loaders: deque[LoaderRun] = deque(maxlen=_LIMIT)


def keep(cell: str, run: FitSamples) -> None:
    """Keep the run of a cell, known by its text; the oldest go when there are too many."""
    _runs.pop(cell, None)
    _runs[cell] = run
    for oldest in list(_runs)[:-_LIMIT]:
        del _runs[oldest]


def last(cell: str) -> FitSamples | None:
    """Return the last run of a cell of this text; of a text never run, as after an edit, the last run of any cell."""
    return _runs.get(cell) or next(reversed(_runs.values()), None)


def keep_loader(run: LoaderRun) -> None:
    """Keep how the loader of a fit was set up, with the time that an epoch took."""
    _loaders.append(run)


def loaders(fit: str) -> tuple[LoaderRun, ...]:
    """Return the loaders of the last runs of a fit, known by its `LoaderRun.fit`; the latest last."""
    return tuple(run for run in _loaders if run.fit == fit)


def forget() -> None:
    """Forget all runs."""
    _runs.clear()
    _loaders.clear()


_SHOWN = 1.3
"""Processor time to end a profile and to show its report, in multiples of the time until the report is made.
Measured: 1.28 to 1.36, for the first profile of a process and for later ones."""
_T = TypeVar("_T")
_running: FitProfile | None = None


def _not_in_the_child() -> None:
    """A process that is forked while a profile runs (`notebook_launcher`) has none, and may begin its own."""
    global _running
    _running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_in_the_child)


class FitProfile:
    """Profiles the code that runs between `start` and `finish`, on the thread that starts it.

    Args:
        options: what to do beyond the usual.
        counter: of memory, if not torch's or malloc's, e.g. of a simulated device.
        spent: nanoseconds of processor time that the profile has taken already, as to import its modules.
    """

    def __init__(self, options: FitOptions | None = None, counter: MemoryCounter | None = None, spent: int = 0) -> None:
        self._options = options or FitOptions()
        self._counter = counter
        self._outputs: Outputs | None = None
        self._own = OwnTime(before=spent)
        self._began = 0  # processor time of the process when all was in place; when the fit ended, what it took meanwhile
        self._operations = 0  # that autograd had recorded on this thread before the fit
        self._instruments: Instruments | None = None
        self._observations: FitObservations | None = None
        self._log: PhaseLog | None = None  # of the recording that ended
        self._report: FitReport | None = None
        self._survivor: tuple[Any, Any] | None = None  # (Learner, callback) while its fit goes on
        self._survived: list[str] = []  # changes that let a fit go on after it ran out of memory, in words
        self._mistakes: list[str] = []  # of steps after the fit, in words for the user

    def __repr__(self) -> str:
        state = "it runs" if self._report is None else "profile.report shows what it found"
        return f"nbguard's profile of a fit: {state}"

    @property
    def report(self) -> FitReport:
        """Return the report. NbguardError while the profile runs."""
        if self._report is None:
            raise NbguardError("the profile is still running; its report is available after the `with` block")
        return self._report

    @property
    def observations(self) -> FitObservations:
        """Return everything that the instruments saw: the report follows from it. NbguardError while the profile runs."""
        if self._observations is None:
            raise NbguardError("the profile is still running; its observations are available after the `with` block")
        return self._observations

    @staticmethod
    def is_any_running() -> bool:
        """Say whether a profile runs in this process."""
        return _running is not None

    def start(self) -> None:
        """Put the profile around the code that runs from here on.

        Raises:
            NbguardError: another profile runs (they would measure each other), PyTorch is not installed, or a file that the
                options name could not be written.
        """
        global _running
        if _running is not None:
            raise NbguardError("a profile runs already: end it first")
        begun = thread_time_ns()
        try:
            import torch  # noqa: F401 - the fit will import it; better before the clock runs
        except ImportError:
            raise NbguardError("PyTorch is not installed here: there is no fit to profile") from None
        self._outputs = Outputs(self._options)
        instruments = Instruments(self._options, Recorder(), self._counter)
        try:
            instruments.start()
            if self._options.survive:
                instruments.recorder.subscribe("learner", self._survives)
                instruments.recorder.subscribe("fit ends", self._survives_no_more)
            self._operations = operations_so_far()
            _running, self._instruments = self, instruments
            self._own = replace(self._own, before=self._own.before + thread_time_ns() - begun)
            self._began = process_time_ns()
        except BaseException:  # an interrupt: nothing of ours stays up
            with postponed():
                instruments.stop()
                _running = self._instruments = None
            raise

    def joins(self, learner: Any, ended: Callable[[BaseException | None], None]) -> None:
        """Say that a fit of a Learner goes on already; `ended` is called once, with the exception that ended it or None."""
        if self._instruments is not None:
            self._instruments.recorder.subscribe("fit ends", ended)
            self._instruments.learners.joins(learner)

    def _survives(self, learner: Any) -> None:
        """Add the callback that lets a fit go on after it ran out of memory, unless the Learner has one."""
        from nbguard.training.survive.learner import SurviveOOM

        if not any(type(callback) is SurviveOOM for callback in learner.cbs):
            self._survivor = learner, SurviveOOM()
            learner.add_cb(self._survivor[1])

    def _survives_no_more(self, _error: BaseException | None) -> None:
        """Take the callback out again, and keep its changes for the report."""
        if self._survivor is not None:
            (learner, callback), self._survivor = self._survivor, None
            learner.remove_cb(callback)
            self._survived += [change.sentence for change in callback.changes]

    def ends(self, error: BaseException | None) -> None:
        """End the recording now, with everything taken down; code from here until `finish` is no part of the fit."""
        global _running
        if self._instruments is None or self._log is not None:
            return
        with postponed():
            self._own, begun = replace(self._own, process=max(process_time_ns() - self._began, 1)), thread_time_ns()
            self._instruments.ended(error)
            self._log, _running = self._instruments.stop(), None
            self._own = replace(self._own, after=thread_time_ns() - begun)

    def finish(self, error: BaseException | None = None, title: str = "", key: str = "") -> FitReport:
        """Take everything down and return the report.

        Args:
            error: the exception that the fit ended with.
            title: the beginning of the report, e.g. `In[7]`.
            key: text that identifies runs of the same code, to compare this one with the last.
        """
        with nullcontext() if self._options.tune_workers else keep_garbage():  # a collection of all takes longer than a report
            return self._finish(error, title, key)

    def _finish(self, error: BaseException | None, title: str, key: str) -> FitReport:
        self.ends(error)
        if self._instruments is None or self._outputs is None or self._log is None:
            return self.report
        (instruments, self._instruments), (log, self._log) = (self._instruments, None), (self._log, None)
        begun = thread_time_ns()
        error_name = "" if error is None else type(error).__name__
        unknown: Ending = "error"
        unknown_failure: Failure = ""
        ending = self._attempt("how it ended", lambda: ending_of(error), unknown)
        observations = instruments.observe(log, title=title, ending=ending, error=error_name)
        failure = self._attempt("why it failed", lambda: failure_of(error), unknown_failure)
        observations = replace(observations, failure=failure, own=replace(self._own, events=observations.own.events))
        analysis = self._attempt(
            "findings",
            lambda: self._observe_more(FitAnalysis(observations), instruments, key),
            FitAnalysis(observations),
        )
        report = self._attempt("the report", lambda: analysis.report, None) or _bare(analysis.observations)
        after = round(_SHOWN * (self._own.after + thread_time_ns() - begun))
        self._observations = replace(analysis.observations, own=replace(analysis.observations.own, after=after))
        report = replace(report, overhead=FitAnalysis(self._observations).overhead(report.timing))
        self._attempt("the history of runs", lambda: _keep(analysis, key), None)
        none: tuple[str, ...] = ()
        written = self._attempt("files", lambda: self._write(report, instruments), none)
        self._report = replace(
            report, files=written, notes=(*report.notes, *self._survived, *self._outputs.failed, *self._mistakes)
        )
        return self._report

    def _attempt(self, what: str, act: Callable[[], _T], otherwise: _T) -> _T:
        """Return the result of a step after the fit; `otherwise`, and a note in the report, where it fails.

        A mistake of ours costs a part of the report, never the cell or the user's own exception.
        """
        try:
            return act()
        except Exception as mistake:  # noqa: BLE001 - see above
            self._mistakes.append(f"{what}: not known ({type(mistake).__name__}: {mistake}); please report it")
            return otherwise

    def _write(self, report: FitReport, instruments: Instruments) -> tuple[str, ...]:
        if self._outputs is None or self._observations is None or not instruments.ranks.speaks:
            return ()
        return tuple(dict.fromkeys(self._outputs.write(report, self._observations)))

    def _observe_more(self, analysis: FitAnalysis, instruments: Instruments, key: str) -> FitAnalysis:
        """Return the analysis with the observations that are worth making, or can be made, only once it is known."""
        options, observed = self._options, analysis.observations
        if options.tune_workers:
            tuning = self._attempt("other numbers of workers", lambda: _tune(instruments, analysis.timing), None)
            observed = replace(observed, tuning=tuning)
        if analysis.may_keep_graphs:
            least = least_kept(analysis.timing.batches)
            tracked = "" if analysis.memory is None else "cuda" if analysis.has_gpu else "cpu"
            none: tuple[KeptGraphs, ...] = ()
            kept = self._attempt("names that keep graphs", lambda: kept_graphs(self._operations, least, tracked), none)
            observed = replace(observed, kept_graphs=kept)
        if (run := analysis.loader_run) is not None:
            observed = replace(observed, tried=loaders(run.fit))
        if options.compare:
            observed = replace(observed, is_compared=True, before=last(key))
        ranks = self._attempt("other ranks", lambda: instruments.ranks.exchange(analysis.rank_row), None)
        return analysis.with_more(replace(observed, ranks=ranks))


def _keep(analysis: FitAnalysis, key: str) -> None:
    """Keep the figures of a fit, to compare the next run of the same code with."""
    if analysis.timing.batches:
        keep(key, analysis.samples)
    if analysis.observations.ending == "complete" and (run := analysis.loader_run) is not None:
        keep_loader(run)


def _bare(observed: FitObservations) -> FitReport:
    """Return a report that says how the fit ended and no more."""
    timing = Timing(wall=observed.log.wall, rows=(), batches=0, warm_up=0, first=None, step=None, step_p95=None, epochs=())
    overhead = Overhead(per_mark=observed.mark_cost, marks=len(observed.log.codes), watching=0, share=0.0)
    return FitReport(
        title=observed.title,
        ending=observed.ending,
        error=observed.error,
        timing=timing,
        overhead=overhead,
        notes=observed.mistakes,
    )


def _tune(instruments: Instruments, timing: Timing) -> WorkerTuning:
    """Time the training loader with other numbers of workers."""
    from nbguard.training.profiler.instruments.tune import tune

    step, wait = timing.step or 0, timing.medians.get(phases.WAIT, 0)
    try:
        return tune(instruments.loaders.loader(), step - wait)
    except KeyboardInterrupt:
        return WorkerTuning(sentence="the trials were interrupted")


_NORM_OF_ONE = "Expected more than 1 value per channel when training"
"""The beginning of PyTorch's message on normalizing a batch of one value."""


def failure_of(error: BaseException | None) -> Failure:
    """Return the cause of an error, where it is one of those known."""
    message = error.args[0] if type(error) is ValueError and error.args else None
    return "batch norm of one" if type(message) is str and message.startswith(_NORM_OF_ONE) else ""


def ending_of(error: BaseException | None) -> Ending:
    """Return how a fit ended, by the exception that ended it."""
    if error is None:
        return "complete"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StoppedAtNaN):
        return "stopped at NaN"
    from nbguard.memory.scan.oom.chain import ran_out

    return "out of memory" if ran_out(error) else "error"
