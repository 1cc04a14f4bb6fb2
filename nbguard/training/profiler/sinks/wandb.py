"""Weights & Biases, whose active run goes on and gets the figures; without one a run is made and finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from nbguard.errors import NbguardError
from nbguard.plain_data import to_json
from nbguard.training.profiler.analysis.figures import Figure, figures, summary
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.sinks.sink import library, numbers_of, own_random

_PROJECT = "nbguard"


class WandbSink:
    """Logs to a run of Weights & Biases, offline if WANDB_MODE says so."""

    def __init__(self, project: str) -> None:
        self._project = project or os.environ.get("WANDB_PROJECT") or _PROJECT
        self.place = f"W&B project {self._project}"
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
