"""Logs of experiments, with their protocol, and functions that all of them need."""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Protocol

from nbguard.errors import NbguardError
from nbguard.files import append_to_file, check_path, open_file
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.training.profiler.analysis.compare import Figure, figures
from nbguard.training.profiler.analysis.report import FitReport

# --- A CSV file, with a row per figure, later fits below earlier ones.


_LONGEST = 1000
"""Bytes of a first line that can be the head."""
_HEAD = ["time", "title", "name", "unit", "of", "epoch", "value"]


class CsvSink:
    """Adds to a CSV file."""

    def __init__(self, where: str) -> None:
        self._path = check_path(where)
        self.place: str = str(self._path)
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


class Sink(Protocol):
    """A place that reports are written to. Made before the fit, which is when it says that it cannot be written to."""

    @property
    def place(self) -> str:
        """Return where it writes, in words for the report, e.g. 'fits.csv'."""

    def write(self, report: FitReport) -> None:
        """Write the figures of a finished report. NbguardError, in one line, where that fails."""

    @property
    def is_live(self) -> bool:
        """Return whether it keeps the latest figures only, so that they may be written as often as one likes."""

    def log(self, title: str, figures: Sequence[Figure]) -> None:
        """Write figures of the memory; their `epoch` is the number of a cell. NbguardError, in one line, where that fails."""

    def close(self) -> None:
        """Write no more figures of the memory. NbguardError, in one line, where that fails."""


def numbers_of(values: Mapping[str, str]) -> dict[str, str | int | float | bool]:
    """Return texts as logs of experiments plot them: numbers and truth values as such, others as texts."""
    return {name: _number(value) for name, value in values.items()}


def _number(text: str) -> str | int | float | bool:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return number if math.isfinite(number) and abs(number) < _PLOTTED and "_" not in text else text
    return text


_PLOTTED = 2**53
"""Numbers from here on are kept as text: as a float they would be another one."""


@contextmanager
def own_random(name: str) -> Iterator[None]:
    """Let a library draw random names and numbers without changing the program's own; its exceptions become one line."""
    try:
        with kept_generators():
            yield
    except NbguardError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NbguardError(f"cannot log to {name}: {first}") from error


def library(module: str, package: str) -> Any:
    """Import and return the library of a log. NbguardError, with what to install, where it is missing or broken."""
    try:
        with own_random(package):
            return importlib.import_module(module)
    except NbguardError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise NbguardError(f"this log needs {package}, which is not installed; run: pip install {package}") from error
        raise
