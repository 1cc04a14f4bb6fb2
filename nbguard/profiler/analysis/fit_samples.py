"""The samples of a fit for a comparison with a later one: times of its steady state, thinned, and a few figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbguard.profiler.analysis.report import Setting

LIMIT = 1000
"""Samples kept of the steps. More of them would say less than the machine changes from run to run."""

PHASE_LIMIT = 250
"""Samples kept of each phase: there are many phases, and to compare them should take less than a second."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The times of one phase in the batches of the steady state, in their order."""

    phase: str  # its name
    values: tuple[int, ...]  # nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSamples:
    """One fit that has ended."""

    title: str  # of its report
    batches: int  # training batches
    steps: tuple[int, ...]  # nanoseconds of whole batches of the steady state, thinned
    phases: tuple[Samples, ...] = ()  # times of each phase
    peak: int | None = None  # bytes
    settings: tuple[Setting, ...] = ()  # e.g. batch size, workers, device, torch


def fit_samples(
    title: str,
    batches: int,
    steps: Sequence[int],
    phases: Mapping[str, Sequence[int]],
    peak: int | None = None,
    settings: Iterable[Setting] = (),
) -> FitSamples:
    """Return the samples of a fit with these `steps` and `phases`: nanoseconds of each batch of the steady state."""
    samples = (Samples(phase, thinned(values, PHASE_LIMIT)) for phase, values in phases.items())
    return FitSamples(
        title=title, batches=batches, steps=thinned(steps), phases=tuple(samples), peak=peak, settings=tuple(settings)
    )


def thinned(values: Sequence[int], limit: int = LIMIT) -> tuple[int, ...]:
    """Return at most `limit` of the values, evenly spread over them, in their order."""
    if len(values) <= limit:
        return tuple(values)
    return tuple(values[index * len(values) // limit] for index in range(limit))
