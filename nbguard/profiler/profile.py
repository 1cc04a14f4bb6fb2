"""A profile from its beginning to its report, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nbguard.errors import NbguardError, StoppedAtNaN
from nbguard.profiler.analysis.compare import compare
from nbguard.profiler.analysis.report import Comparison, Ending, FitReport
from nbguard.profiler.analysis.run_record import FitRun
from nbguard.profiler.instruments.instruments import Watch
from nbguard.profiler.instruments.memory.counters import Meter
from nbguard.profiler.options import FitOptions
from nbguard.profiler.outputs import Outputs
from nbguard.profiler.record.recorder import Recorder
from nbguard.profiler.report_builder import Making
from nbguard.profiler.run_history import keep, last

_running: FitProfile | None = None


class FitProfile:
    """A profile of what runs between `start` and `finish`, on the thread that starts it.

    Args:
        options: what to do beyond the usual.
        meter: who counts memory, if not torch or malloc: a simulated device.
    """

    def __init__(self, options: FitOptions | None = None, meter: Meter | None = None) -> None:
        self._options = options or FitOptions()
        self._meter = meter
        self._outputs: Outputs | None = None
        self._watch: Watch | None = None
        self._report: FitReport | None = None

    @property
    def report(self) -> FitReport:
        """Return the report. NbguardError while the profile runs."""
        if self._report is None:
            raise NbguardError("the profile has not ended yet: its report is there after the `with` block")
        return self._report

    @staticmethod
    def is_any_running() -> bool:
        """Say whether a profile runs in this process."""
        return _running is not None

    def start(self) -> None:
        """Put the profile around what runs from here on.

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
        watch = Watch(self._options, Recorder(), self._meter)
        try:
            watch.start()
        except BaseException:  # an interrupt: nothing of ours stays up
            watch.stop()
            raise
        _running, self._watch = self, watch

    def joins(self, learner: Any, ended: Callable[[BaseException | None], None]) -> None:
        """Say that a fit of a Learner goes on already; `ended` is called once, with what it raised or None."""
        if self._watch is not None:
            self._watch.recorder.watch("fit ends", ended)
            self._watch.fastai.joins(learner)

    def finish(self, error: BaseException | None = None, title: str = "", key: str = "") -> FitReport:
        """Take everything down and return the report.

        Args:
            error: what the fit ended with.
            title: what the report begins with, e.g. `In[7]`.
            key: by which runs of the same code are known, to compare this one with the last.
        """
        global _running
        if self._watch is None or self._outputs is None:
            return self.report
        watch, self._watch = self._watch, None
        _running = None
        marks = watch.stop()
        making = Making(watch, marks, self._options)
        report = making.report(ending_of(error), "" if error is None else type(error).__name__, title)
        if report.timing.batches:
            report = self._compared(report, making.run(report), key)
        files = tuple(self._outputs.write(report, marks)) if watch.ranks.speaks else ()
        self._report = replace(report, files=files, notes=(*report.notes, *self._outputs.failed))
        return self._report

    def _compared(self, report: FitReport, run: FitRun, key: str) -> FitReport:
        """Return the report with what has changed since the last run of the same code, if asked for; keep this one."""
        before = last(key) if self._options.compare else None
        keep(key, run)
        if not self._options.compare:
            return report
        found = Comparison("there is no earlier run to compare with") if before is None else compare(run, before)
        return replace(report, comparison=found)


def ending_of(error: BaseException | None) -> Ending:
    """Return how a fit has ended, by what it raised."""
    if error is None:
        return "complete"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StoppedAtNaN):
        return "stopped at NaN"
    from nbguard.scan.oom.notes import ran_out

    return "out of memory" if ran_out(error) else "error"
