"""A CSV file, with a row per figure, later fits below earlier ones."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import datetime, timezone

from nbguard.errors import NbguardError
from nbguard.files import append_to_file, open_file
from nbguard.training.profiler.analysis.figures import Figure, figures
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.files import check_path

_LONGEST = 1000
"""Bytes of a first line that can be the head."""
_HEAD = ["time", "title", "name", "unit", "of", "epoch", "value"]


class CsvSink:
    """Adds to a CSV file."""

    def __init__(self, where: str) -> None:
        self._path = check_path(where)
        self.place = str(self._path)
        if self._is_old() and self._first_row() != _HEAD:
            raise NbguardError(f"{self._path} has other columns than {','.join(_HEAD)}; name another file")

    is_live = False

    def write(self, report: FitReport) -> None:
        """Add a row per figure."""
        self.log(report.title, figures(report))

    def log(self, title: str, figures: Sequence[Figure]) -> None:
        """Add a row per figure."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            text = io.StringIO(newline="")
            rows = csv.writer(text)
            if not self._is_old():
                rows.writerow(_HEAD)
            for figure in figures:
                epoch = "" if figure.epoch is None else figure.epoch
                rows.writerow([now, title, figure.name, figure.unit, figure.of, epoch, figure.value])
            append_to_file(self._path, text.getvalue().encode("utf-8", "replace"))
        except OSError as error:
            raise NbguardError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Do nothing: the file is closed after each writing."""

    def _is_old(self) -> bool:
        return self._path.exists() and self._path.stat().st_size > 0

    def _first_row(self) -> list[str]:
        try:
            with open_file(self._path) as file:
                return next(csv.reader([file.readline(_LONGEST).decode()]), [])
        except (OSError, ValueError, csv.Error):
            return []
