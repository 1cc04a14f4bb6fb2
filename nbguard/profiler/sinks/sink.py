"""Logs of experiments: their protocol, and functions that all of them need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from nbguard.errors import NbguardError
from nbguard.profiler.analysis.report import FitReport
from nbguard.scan.devices.generators import kept_generators


class Sink(Protocol):
    """A place that reports are written to. Made before the fit, which is when it says that it cannot be written to."""

    @property
    def place(self) -> str:
        """Return where it writes, in words for the report, e.g. 'fits.csv'."""

    def write(self, report: FitReport) -> None:
        """Write the figures of a finished report. NbguardError, in one line, where that fails."""


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
            raise NbguardError(f"--log needs {package}, which is not installed; run: pip install {package}") from error
        raise
