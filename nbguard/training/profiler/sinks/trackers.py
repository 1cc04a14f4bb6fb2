"""Weights & Biases, whose active run goes on and gets the figures; without one a run is made and finished."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError
from nbguard.plain_data import to_json
from nbguard.training.profiler.analysis.compare import Figure, figures, summary
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.sinks.sink import library, numbers_of, own_random
from nbguard.training.runs.analysis.record import RunRecord
from nbguard.training.runs.comparing import ARTIFACT

# --- A folder of TensorBoard's, with scalars, by epoch where there are any, the report's sentences and the record of the run.


class TensorBoardSink:
    """Adds a file of events to a folder."""

    def __init__(self, where: str) -> None:
        self._folder = Path(where).expanduser()
        self.place: str = str(self._folder)
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


# --- MLflow, whose active run gets the figures; without one a run is made and ended.


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
        self.place: str = f"MLflow experiment {self._experiment}"
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


_PROJECT = "nbguard"


class WandbSink:
    """Logs to a run of Weights & Biases, offline if WANDB_MODE says so."""

    def __init__(self, project: str) -> None:
        self._project = project or os.environ.get("WANDB_PROJECT") or _PROJECT
        self.place: str = f"W&B project {self._project}"
        self._wandb = library("wandb", "wandb")
        with own_random("W&B"):
            if self._wandb.run is None and not self._can_start():
                raise NbguardError(
                    "W&B has no login here; run: wandb login, or log on this machine only: %env WANDB_MODE=offline"
                )

    def _can_start(self) -> bool:
        """Say whether a run can begin without a question to the user."""
        settings = self._wandb.setup().settings
        return settings.mode != "online" or bool(self._wandb.login(prompt=False, verify=False))

    def write(self, report: FitReport) -> None:
        """Log the epochs one after the other, set the rest in the run's summary, and the record in its config."""
        with own_random("W&B"):
            if self._wandb.run is not None:
                self._log(self._wandb.run, report)
                return
            settings = self._wandb.Settings(silent=True, console="off")
            with self._wandb.init(project=self._project, job_type="profile", settings=settings) as run:
                self._log(run, report)

    is_live = False

    def log(self, title: str, figures: Sequence[Figure]) -> None:  # noqa: ARG002 - a run has numbers only
        """Log figures of the memory to the run that is active, with the number of the cell; without one they are left out.

        A run that stayed open from cell to cell would take the place of the one that the user begins.
        """
        with own_random("W&B"):
            if self._wandb.run is not None:
                cell = next((figure.epoch for figure in figures if figure.epoch is not None), 0)
                self._wandb.run.log({"nbguard/cell": cell, **{figure.key: figure.value for figure in figures}})

    def close(self) -> None:
        """Do nothing: the run is the user's."""

    def _log(self, run: Any, report: FitReport) -> None:
        epochs: dict[int, dict[str, float]] = {}
        whole: dict[str, Any] = {"nbguard/report": summary(report)}
        for figure in figures(report):
            (whole if figure.epoch is None else epochs.setdefault(figure.epoch, {}))[figure.key] = figure.value
        for number, values in epochs.items():
            run.log({"nbguard/epoch": number, **values})
        run.summary.update(whole)
        if report.record is not None:
            record = report.record
            topics = dict.fromkeys(fact.topic for fact in record.facts)
            run.config.update({"nbguard": {topic: numbers_of(record.of(topic)) for topic in topics}}, allow_val_change=True)
            run.summary.update({"nbguard/run": to_json(record.to_data())})
