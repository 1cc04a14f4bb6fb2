"""A folder of TensorBoard's: scalars, by epoch where there are epochs, and the sentences of the report as text."""

from __future__ import annotations

from pathlib import Path

from nbguard.errors import NbguardError
from nbguard.profiler.analysis.figures import figures, summary
from nbguard.profiler.analysis.report import FitReport
from nbguard.profiler.sinks.sink import library, own_random


class TensorBoardSink:
    """Adds a file of events to a folder."""

    def __init__(self, where: str) -> None:
        self._folder = Path(where).expanduser()
        self.place = str(self._folder)
        library("tensorboard", "tensorboard")
        self._writer = library("torch.utils.tensorboard", "tensorboard").SummaryWriter
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NbguardError(f"cannot make the folder {self._folder}: {error.strerror}; name another") from error

    def write(self, report: FitReport) -> None:
        """Write the scalars and the text."""
        with own_random("TensorBoard"), self._writer(log_dir=str(self._folder)) as writer:
            for figure in figures(report):
                writer.add_scalar(figure.key, figure.value, figure.epoch or 0)
            writer.add_text("nbguard/report", summary(report), 0)
