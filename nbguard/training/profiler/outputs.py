"""The files and logs of a profile, checked before the fit, which may take hours, and written after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from nbguard.errors import NbguardError
from nbguard.training.profiler.analysis.observations import FitObservations
from nbguard.training.profiler.analysis.report import FitReport, MemoryReport
from nbguard.training.profiler.analysis.time.phase_log import joined
from nbguard.training.profiler.analysis.time.trace import trace_events
from nbguard.training.profiler.files import check_path, write_json, write_text
from nbguard.training.profiler.options import FitOptions
from nbguard.training.profiler.sinks import open_sink


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
