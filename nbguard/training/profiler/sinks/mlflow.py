"""MLflow, whose active run gets the figures; without one a run is made and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from nbguard.training.profiler.analysis.figures import Figure, figures, summary
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.sinks.sink import library, own_random
from nbguard.training.runs.analysis.record import RunRecord
from nbguard.training.runs.comparing import ARTIFACT

_EXPERIMENT = "nbguard"
_AT_ONCE = 1000  # metrics that MLflow takes in one request
_PARAMS = 100  # parameters that it takes in one request
_VALUE, _TAG = 6000, 8000  # characters of the value of a parameter and of a tag


class MlflowSink:
    """Logs to a run of MLflow, wherever it keeps them (MLFLOW_TRACKING_URI)."""

    def __init__(self, experiment: str) -> None:
        self._mlflow = library("mlflow", "mlflow")
        self._experiment = experiment or _EXPERIMENT
        self._own: str | None = None  # id of a run that has the memory only
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

    is_live = False

    def log(self, title: str, figures: Sequence[Figure]) -> None:
        """Log figures of the memory, the number of the cell being their step: to the active run, or to one of their own."""
        with own_random("MLflow"):
            active = self._mlflow.active_run()
            self._metrics(self._own_run(title) if active is None else active.info.run_id, figures)

    def close(self) -> None:
        """End the run of the memory's own, if there is one."""
        if self._own is not None:
            with own_random("MLflow"):
                self._client.set_terminated(self._own)
            self._own = None

    def _own_run(self, title: str) -> str:
        """Return the id of the run that has the memory only, made if there is none."""
        if self._own is None:
            self._own = str(self._client.create_run(self._id(), run_name=f"memory from {title} on").info.run_id)
        return self._own

    def _id(self) -> str:
        """Return the id of the experiment, made if there is none."""
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(self._experiment))

    def _log(self, run: str, report: FitReport) -> None:
        self._metrics(run, figures(report))
        self._client.log_text(run, summary(report), "nbguard.md")
        if report.record is not None:
            self._keep(run, report.record)

    def _metrics(self, run: str, figures: Sequence[Figure]) -> None:
        now = time.time_ns() // 1_000_000
        metrics: list[Any] = [
            self._mlflow.entities.Metric(figure.key, float(figure.value), now, figure.epoch or 0) for figure in figures
        ]
        for start in range(0, len(metrics), _AT_ONCE):
            self._client.log_batch(run, metrics[start : start + _AT_ONCE])

    def _keep(self, run: str, record: RunRecord) -> None:
        """Keep the record: as parameters, except those that the user set, as MLflow's own tags, and as a file."""
        entities, data = self._mlflow.entities, self._client.get_run(run).data
        names = {_name(name): value[:_VALUE] for name, value in record.flat().items()}
        params = [entities.Param(name, value) for name, value in names.items() if name not in data.params]
        tags = {name: value for name, value in _tags(record).items() if value and name not in data.tags}
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(run, params=params[start : start + _PARAMS])
        self._client.log_batch(run, tags=[entities.RunTag(name, value[:_TAG]) for name, value in tags.items()])
        self._client.log_dict(run, record.to_data(), ARTIFACT)


def _name(name: str) -> str:
    """Return the name of a fact as MLflow takes it: letters, digits and `_-./: `, 250 characters at most."""
    return "".join(char if char.isalnum() or char in "_-./: " else "_" for char in f"nbguard.{name}")[:250]


def _tags(record: RunRecord) -> dict[str, str]:
    """Return the tags that MLflow itself tells a run's origin with."""
    git, place = record.of("git"), record.of("place")
    return {
        "mlflow.source.name": place.get("notebook", ""),
        "mlflow.source.type": "NOTEBOOK" if "notebook" in place or record.cells else "LOCAL",
        "mlflow.source.git.commit": git.get("commit", ""),
        "mlflow.source.git.branch": git.get("branch", ""),
        "mlflow.source.git.dirty": git.get("dirty", "").lower(),
        "mlflow.source.git.diff": record.diff,
        "mlflow.source.git.repoURL": git.get("repository", ""),
    }
