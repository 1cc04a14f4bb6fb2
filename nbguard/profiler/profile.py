"""A profile from its beginning to its report, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbguard.errors import NbguardError, StoppedAtNaN
from nbguard.profiler import run_history
from nbguard.profiler.analysis.fit_report import FitAnalysis
from nbguard.profiler.analysis.loader.tuning import WorkerTuning
from nbguard.profiler.analysis.memory.growth import least_kept
from nbguard.profiler.analysis.observations import FitObservations
from nbguard.profiler.analysis.report import Ending, FitReport, Timing
from nbguard.profiler.analysis.time import phases
from nbguard.profiler.instruments.instruments import Instruments
from nbguard.profiler.instruments.memory.counters import MemoryCounter
from nbguard.profiler.instruments.memory.growth import kept_graphs, operations_so_far
from nbguard.profiler.options import FitOptions
from nbguard.profiler.outputs import Outputs
from nbguard.profiler.record.recorder import Recorder

_running: FitProfile | None = None


class FitProfile:
    """Profiles the code that runs between `start` and `finish`, on the thread that starts it.

    Args:
        options: what to do beyond the usual.
        counter: of memory, if not torch's or malloc's, e.g. of a simulated device.
    """

    def __init__(self, options: FitOptions | None = None, counter: MemoryCounter | None = None) -> None:
        self._options = options or FitOptions()
        self._counter = counter
        self._outputs: Outputs | None = None
        self._operations = 0  # that autograd had recorded on this thread before the fit
        self._instruments: Instruments | None = None
        self._observations: FitObservations | None = None
        self._report: FitReport | None = None

    @property
    def report(self) -> FitReport:
        """Return the report. NbguardError while the profile runs."""
        if self._report is None:
            raise NbguardError("the profile has not ended yet: its report is there after the `with` block")
        return self._report

    @property
    def observations(self) -> FitObservations:
        """Return everything that the instruments saw: the report follows from it. NbguardError while the profile runs."""
        if self._observations is None:
            raise NbguardError("the profile has not ended yet: its observations are there after the `with` block")
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
        try:
            import torch  # noqa: F401 - the fit will import it; better before the clock runs
        except ImportError:
            raise NbguardError("PyTorch is not installed here: there is no fit to profile") from None
        self._outputs = Outputs(self._options)
        instruments = Instruments(self._options, Recorder(), self._counter)
        try:
            instruments.start()
        except BaseException:  # an interrupt: nothing of ours stays up
            instruments.stop()
            raise
        self._operations = operations_so_far()
        _running, self._instruments = self, instruments

    def joins(self, learner: Any, ended: Callable[[BaseException | None], None]) -> None:
        """Say that a fit of a Learner goes on already; `ended` is called once, with the exception that ended it or None."""
        if self._instruments is not None:
            self._instruments.recorder.subscribe("fit ends", ended)
            self._instruments.fastai.joins(learner)

    def finish(self, error: BaseException | None = None, title: str = "", key: str = "") -> FitReport:
        """Take everything down and return the report.

        Args:
            error: the exception that the fit ended with.
            title: the beginning of the report, e.g. `In[7]`.
            key: text by which runs of the same code are known, to compare this one with the last.
        """
        global _running
        if self._instruments is None or self._outputs is None:
            return self.report
        instruments, self._instruments = self._instruments, None
        _running = None
        log = instruments.stop()
        error_name = "" if error is None else type(error).__name__
        observations = instruments.observe(log, title=title, ending=ending_of(error), error=error_name)
        analysis = self._observe_more(FitAnalysis(observations), instruments, key)
        if analysis.timing.batches:
            run_history.keep(key, analysis.run_record)
        self._observations = analysis.observations
        written = self._outputs.write(analysis.report, self._observations) if instruments.ranks.speaks else ()
        files = tuple(dict.fromkeys(written))
        self._report = replace(analysis.report, files=files, notes=(*analysis.report.notes, *self._outputs.failed))
        return self._report

    def _observe_more(self, analysis: FitAnalysis, instruments: Instruments, key: str) -> FitAnalysis:
        """Return the analysis with the observations that are worth making, or can be made, only once it is known."""
        options = self._options
        if options.tune_workers:
            tuning = _tune(instruments, analysis.timing)
            analysis = analysis.with_more(replace(analysis.observations, tuning=tuning))
        if analysis.may_keep_graphs:
            kept = kept_graphs(self._operations, least_kept(analysis.timing.batches))
            analysis = analysis.with_more(replace(analysis.observations, kept_graphs=kept))
        if options.compare:
            before = run_history.last(key)
            analysis = analysis.with_more(replace(analysis.observations, is_compared=True, before=before))
        ranks = instruments.ranks.exchange(analysis.rank_row)
        return analysis if ranks is None else analysis.with_more(replace(analysis.observations, ranks=ranks))


def _tune(instruments: Instruments, timing: Timing) -> WorkerTuning:
    """Time the training loader with other numbers of workers."""
    from nbguard.profiler.instruments.loader.tune import tune

    step, wait = timing.step or 0, timing.medians.get(phases.WAIT, 0)
    try:
        return tune(instruments.loaders.loader(), step - wait)
    except KeyboardInterrupt:
        return WorkerTuning(sentence="the trials were interrupted")


def ending_of(error: BaseException | None) -> Ending:
    """Return how a fit has ended, by the exception that ended it."""
    if error is None:
        return "complete"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StoppedAtNaN):
        return "stopped at NaN"
    from nbguard.scan.oom.notes import ran_out

    return "out of memory" if ran_out(error) else "error"
