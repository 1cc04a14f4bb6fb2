"""MLflow: the run that is active gets the figures; without one a run of its own is made and ended."""

from __future__ import annotations

import time
from typing import Any

from nbguard.profiler.analysis.figures import figures, summary
from nbguard.profiler.analysis.report import FitReport
from nbguard.profiler.sinks.sink import library, own_random

_EXPERIMENT = "nbguard"
_AT_ONCE = 1000  # metrics that MLflow takes in one request


class MlflowSink:
    """Logs to a run of MLflow, wherever it keeps them (MLFLOW_TRACKING_URI)."""

    def __init__(self, experiment: str) -> None:
        self._mlflow = library("mlflow", "mlflow")
        self._experiment = experiment or _EXPERIMENT
        self.place = f"MLflow experiment {self._experiment}"
        with own_random("MLflow"):
            self._client = self._mlflow.MlflowClient()
            self._client.get_experiment_by_name(self._experiment)  # the store is there, and can be read

    def write(self, report: FitReport) -> None:
        """Log the figures, epochs as steps, and the sentences of the report as a file."""
        with own_random("MLflow"):
            active = self._mlflow.active_run()
            if active is not None:
                self._log(active.info.run_id, report)
                return
            run = self._client.create_run(self._id(), run_name=report.title)
            self._log(run.info.run_id, report)
            self._client.set_terminated(run.info.run_id)

    def _id(self) -> str:
        """Return the id of the experiment, made if there is none."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(self._experiment))

    def _log(self, run: str, report: FitReport) -> None:
        now = time.time_ns() // 1_000_000
        metrics: list[Any] = [
            self._mlflow.entities.Metric(figure.key, float(figure.value), now, figure.epoch or 0) for figure in figures(report)
        ]
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(run, metrics[start : start + _AT_ONCE])
        self._client.log_text(run, summary(report), "nbguard.md")
