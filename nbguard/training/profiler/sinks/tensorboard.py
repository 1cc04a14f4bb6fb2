"""A folder of TensorBoard's, with scalars, by epoch where there are any, the report's sentences and the record of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError
from nbguard.plain_data import to_json
from nbguard.training.profiler.analysis.figures import Figure, figures, summary
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.sinks.sink import library, numbers_of, own_random


class TensorBoardSink:
    """Adds a file of events to a folder."""

    def __init__(self, where: str) -> None:
        self._folder = Path(where).expanduser()
        self.place = str(self._folder)
        library("tensorboard", "tensorboard")
        self._open: Any = None  # the writer of the memory, which stays open from cell to cell
        self._writer = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NbguardError(f"cannot make the folder {self._folder}: {error.strerror}; name another") from error

    def write(self, report: FitReport) -> None:
        """Write the scalars, the text, and the record as hyper-parameters and as text."""
        with own_random("TensorBoard"), self._writer(log_dir=str(self._folder)) as writer:
            for figure in figures(report):
                writer.add_scalar(figure.key, figure.value, figure.epoch or 0)
            writer.add_text("nbguard/report", summary(report), 0)
            if report.record is not None:
                step = report.timing.step
                metrics = {} if step is None else {"nbguard/step_median_seconds": step / 1e9}
                writer.add_hparams(numbers_of(report.record.flat()), metrics, run_name=".")
                writer.add_text("nbguard/run", f"```json\n{to_json(report.record.to_data())}\n```", 0)

    is_live = False

    def log(self, title: str, figures: Sequence[Figure]) -> None:  # noqa: ARG002 - a scalar has a number only
        """Write scalars, the number of the cell being their step."""
        with own_random("TensorBoard"):
            if self._open is None:
                self._open = self._writer(log_dir=str(self._folder))
            for figure in figures:
                self._open.add_scalar(figure.key, figure.value, figure.epoch or 0)
            self._open.flush()

    def close(self) -> None:
        """Close the file of events."""
        if self._open is not None:
            with own_random("TensorBoard"):
                self._open.close()
            self._open = None
