"""The form of a check: a class that watches one thing during a fit, its facts, and the findings that follow.

A check is one file. Its class watches, with effects; `diagnose` is pure, as is all above the class. `CHECKS` lists it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.record.recorder import Recorder

Observed = TypeVar("Observed", covariant=True)
_Facts = TypeVar("_Facts")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFigures:
    """The figures of a whole fit, that a check diagnoses its facts by. Times are nanoseconds."""

    wall: int  # of the fit
    step: int | None = None  # the median of a batch
    gainable: int | None = None  # of a batch, that the program can save
    times: Mapping[str, int]  # the medians of a batch's phases, by name
    kinds: frozenset[str] = frozenset()  # of the findings on values, optimizers and scales, which are diagnosed before

    @property
    def work(self) -> int:
        """Return the nanoseconds of a batch in forward and backward passes."""
        return sum(self.times.get(phase, 0) for phase in (phase_log.FORWARD, phase_log.LOSS, phase_log.BACKWARD))


class Instrument(Protocol[Observed]):
    """Watches one thing during a fit. Its observations are a part of `FitObservations`: frozen, without live objects."""

    watches: str
    """The thing in plural, named in the report where the instrument fails; of the class."""

    def start(self, recorder: Recorder) -> None:
        """Subscribe and patch, on the thread of the fit. An exception switches it off, not the fit."""

    def stop(self) -> None:
        """Take everything down again; called once, however the fit ended, and before anything is shown."""

    def observe(self) -> Observed:
        """Return its observations; called after `stop`."""


class FitCheck(Instrument[Any], Protocol):
    """An instrument with facts and a diagnosis of its own."""

    name: str
    """Its key in saved observations; of the class."""
    facts: Any
    """Of the class: a frozen dataclass of plain data; without arguments: nothing was seen."""

    @staticmethod
    def diagnose(facts: Any, fit: FitFigures) -> Iterable[FitFinding]:
        """Return the findings that follow from the facts. Pure."""


def facts_of(checks: Iterable[object], kind: type[_Facts]) -> _Facts:
    """Return the facts of one kind, or the facts of an unobserved fit where there are none."""
    return next((facts for facts in checks if type(facts) is kind), kind())
