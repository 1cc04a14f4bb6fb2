"""A file in Prometheus' text format, as its node exporter collects them (`--collector.textfile`)."""

from __future__ import annotations

from typing import Any

from nbguard.profiler.analysis.figures import figures
from nbguard.profiler.analysis.report import FitReport
from nbguard.profiler.files import check_path
from nbguard.profiler.sinks.sink import library, own_random


class PrometheusSink:
    """Writes a file anew, with the figures of the last fit."""

    def __init__(self, where: str) -> None:
        self._path = check_path(where)
        self.place = str(self._path)
        self._client = library("prometheus_client", "prometheus-client")

    def write(self, report: FitReport) -> None:
        """Write a gauge per name, with the phase as its label; of epochs the last one."""
        registry = self._client.CollectorRegistry()
        gauges: dict[str, Any] = {}
        with own_random("Prometheus"):
            for figure in figures(report):
                labels = {"of": figure.of} if figure.of else {}
                if figure.full_name not in gauges:
                    words = f"{figure.name.replace('_', ' ')} of the last fit"
                    name = f"nbguard_{figure.full_name}"
                    gauges[figure.full_name] = self._client.Gauge(name, words, list(labels), registry=registry)
                gauge = gauges[figure.full_name]
                (gauge.labels(**labels) if labels else gauge).set(figure.value)
            self._client.write_to_textfile(str(self._path), registry)
