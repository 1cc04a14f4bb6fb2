"""A file in Prometheus' text format, as its node exporter collects them (`--collector.textfile`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from nbguard.errors import NbguardError
from nbguard.files import check_path, write_file
from nbguard.memory.core.processes import Identity, session_name
from nbguard.memory.scan.devices.processes import identity_of
from nbguard.training.profiler.analysis.compare import Figure, figures
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.sinks.sink import library


class PrometheusSink:
    """Writes a file again, as a whole, with the latest figures of the last fit, or of the memory.

    Each has the notebook as a label: node exporter refuses the files of two kernels that say the same of themselves.
    """

    is_live = True

    def __init__(self, where: str) -> None:
        self._path = check_path(where)
        self.place: str = str(self._path)
        self._client = library("prometheus_client", "prometheus-client")
        self._notebook = _notebook()
        self._latest: dict[tuple[str, str], Figure] = {}
        self._lock = threading.Lock()  # the file is also written while a cell runs

    def write(self, report: FitReport) -> None:
        """Write a gauge per name, with the notebook and the phase as its labels; of epochs the last one."""
        self._write({(figure.full_name, figure.of): figure for figure in figures(report)}, "of the last fit")

    def log(self, title: str, figures: Sequence[Figure]) -> None:  # noqa: ARG002 - a gauge has a number only
        """Write a gauge per name, with the notebook and the device as its labels; gauges without a new value stay."""
        with self._lock:
            self._latest |= {(figure.full_name, figure.of): figure for figure in figures}
            self._write(self._latest, "of the kernel")

    def close(self) -> None:
        """Do nothing: the last figures stay in the file."""

    def _write(self, latest: dict[tuple[str, str], Figure], of: str) -> None:
        registry = self._client.CollectorRegistry()
        gauges: dict[str, Any] = {}
        try:  # not `own_random`: in another thread it would take back the user's draws meanwhile
            for figure in latest.values():
                labels = {"notebook": self._notebook} | ({"of": figure.of} if figure.of else {})
                if figure.full_name not in gauges:
                    words = f"{figure.name.replace('_', ' ')} {of}"
                    name = f"nbguard_{figure.full_name}"
                    gauges[figure.full_name] = self._client.Gauge(name, words, list(labels), registry=registry)
                gauge = gauges[figure.full_name]
                gauge.labels(**labels).set(figure.value)
            write_file(self._path, self._client.generate_latest(registry))
        except OSError as error:
            raise NbguardError(f"cannot log to {self.place}: {error.strerror}") from error
        except ValueError as error:
            raise NbguardError(f"cannot log to {self.place}: {error}") from error


def _notebook() -> str:
    """Return the path of the notebook that this process runs; without one its program and pid, as no other has both."""
    identity = identity_of(os.getpid()) or Identity()
    return session_name(os.environ) or f"{identity.program} (pid {os.getpid()})".lstrip()
