"""Logs of experiments: `csv:FILE | tensorboard:DIR | wandb | mlflow | prometheus:FILE`, for reports and for the memory."""

from __future__ import annotations

import csv
import importlib
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from nbguard.errors import NbguardError
from nbguard.files import append_to_file, check_path, open_file, write_file
from nbguard.memory.core.processes import Identity, session_name
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.memory.scan.devices.processes import identity_of
from nbguard.plain_data import to_json
from nbguard.training.profiler.analysis.compare import Figure, figures, summary
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.runs.analysis.record import RunRecord
from nbguard.training.runs.comparing import ARTIFACT

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


# --- A file in Prometheus' text format, as its node exporter collects them (`--collector.textfile`)


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


# --- Weights & Biases, whose active run goes on and gets the figures; without one a run is made and finished


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


# --- the log that a line names


_USAGE = "csv:FILE, tensorboard:DIR, wandb, wandb:PROJECT, mlflow, mlflow:EXPERIMENT or prometheus:FILE"


def open_sink(spec: str) -> Sink:
    """Return the log that `spec` names. NbguardError, in one line, if it could not be written to: ask before the fit."""
    opener, where = opener_of(spec)
    return opener(where)


def opener_of(spec: str) -> tuple[Callable[[str], Sink], str]:
    """Return the function that opens the log that `spec` names, and the place. NbguardError, in one line, if it names none."""
    kind, _, where = spec.partition(":")
    opener = _OPENERS.get(kind)
    if opener is None:
        raise NbguardError(f"no log is called {kind!r}; write {_USAGE}")
    if not where and kind in ("csv", "tensorboard", "prometheus"):
        raise NbguardError(f"a {kind} log needs a place to write to; write {kind}:{'DIR' if kind == 'tensorboard' else 'FILE'}")
    return opener, where


_OPENERS: dict[str, Callable[[str], Sink]] = {
    "csv": CsvSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "prometheus": PrometheusSink,
}
