"""Logs of experiments: `csv:FILE | tensorboard:DIR | wandb | mlflow | prometheus:FILE`, for reports and for the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbguard.errors import NbguardError

if TYPE_CHECKING:
    from nbguard.training.profiler.sinks.sink import Sink

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


def _csv(where: str) -> Sink:
    from nbguard.training.profiler.sinks.sink import CsvSink

    return CsvSink(where)


def _tensorboard(where: str) -> Sink:
    from nbguard.training.profiler.sinks.trackers import TensorBoardSink

    return TensorBoardSink(where)


def _wandb(where: str) -> Sink:
    from nbguard.training.profiler.sinks.trackers import WandbSink

    return WandbSink(where)


def _mlflow(where: str) -> Sink:
    from nbguard.training.profiler.sinks.trackers import MlflowSink

    return MlflowSink(where)


def _prometheus(where: str) -> Sink:
    from nbguard.training.profiler.sinks.prometheus import PrometheusSink

    return PrometheusSink(where)


_OPENERS: dict[str, Callable[[str], Sink]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "prometheus": _prometheus,
}
