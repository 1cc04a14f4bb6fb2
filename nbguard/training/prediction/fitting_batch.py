"""A smaller batch and changes that let a fit that ran out of memory run, predicted in limited time, after a cleanup."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from nbguard.errors import NbguardError
from nbguard.memory.allocator.model.settings import parse_version
from nbguard.training.prediction.fits.learner_fit import LearnerSource
from nbguard.training.prediction.predict import tracer_of
from nbguard.training.prediction.prediction import ChangeKind, Saving
from nbguard.training.prediction.savings import savings
from nbguard.training.prediction.trace import FitTracer, OutOfTimeError

_OF_BATCH = 0.5
"""Share of the time for enlarging a batch that fits; the rest is for the changes."""
_TRIED: frozenset[ChangeKind] = frozenset({"precision", "accumulation", "checkpoints", "frozen"})
"""Kinds of changes that are tried."""


def fitting_changes(learn: Any, failed: int, freed: frozenset[int], seconds: float) -> tuple[int | None, tuple[Saving, ...]]:
    """Return the items of a batch that is sure to fit, and the changes to the fit that save memory, or None without one.

    The failed size is halved until one fits; the remaining time goes into larger ones below the last that did not, and
    then into the changes; each takes a trace.

    Args:
        learn: the Learner whose fit failed.
        failed: items of its batch.
        freed: addresses of blocks that a cleanup frees before.
        seconds: until the last begin of a trace.
    """
    began = time.monotonic()
    try:
        source = LearnerSource.of(learn, None)
        tracer = replace(tracer_of(source, freed=freed), until=began + seconds, is_last_optional=True)
        if tracer.start is None:
            return None, ()
        items = _largest(tracer, failed, began + _OF_BATCH * seconds)
    except NbguardError:
        return None, ()
    return items, () if items is None else _changes(tracer)


def largest_in_time(tracer: FitTracer, seconds: float) -> tuple[int, int] | None:
    """Return the items of a fit's batch, and of the largest found to fit in `seconds`, or None if none was."""
    began, size = time.monotonic(), tracer.source.size
    if tracer.start is None or size < 2:
        return None
    try:
        items = _largest(replace(tracer, until=began + seconds, is_last_optional=True), size, began + _OF_BATCH * seconds)
    except NbguardError:
        return None
    return None if items is None else (size, items)


def _changes(tracer: FitTracer) -> tuple[Saving, ...]:
    """Return the changes that could be tried in time, those that save most first."""
    try:
        endless = tracer.endless(None)
    except NbguardError:
        return ()
    return savings(tracer, None, endless, parse_version(str(torch.__version__)), is_wanted=lambda change: change.kind in _TRIED)


def _largest(tracer: FitTracer, failed: int, enough: float) -> int | None:
    """Return the largest batch that was found to fit; after the time `enough`, the first one that does."""
    low, high = 0, failed
    try:
        half = tracer.endless(max(1, failed // 2))
        if half.unknown:
            return None
        band = max(half.band, half.band_of((tracer.gpu.capacity or 0) - tracer.gpu.context))
        while high - low > 1 and high - low > low // 16 and not (low and time.monotonic() > enough):
            size = (low + high) // 2
            if tracer.runs(size, band):
                low = size
            else:
                high = size
    except OutOfTimeError:
        pass
    return low or None
