"""A smaller batch with which a fit that ran out of memory runs, foreseen in limited time on the device after a cleanup."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from nbguard.errors import NbguardError
from nbguard.training.prediction.fits.fastai_fit import LearnerSource
from nbguard.training.prediction.predict import tracer_of
from nbguard.training.prediction.trace import FitTracer, OutOfTimeError


def fitting_batch(learn: Any, failed: int, freed: frozenset[int], seconds: float) -> int | None:
    """Return the items of a batch that is sure to fit; None where none is found, or nothing can be foreseen.

    The failed size is halved until one fits; what is left of the time goes into larger ones below the last that did not.

    Args:
        learn: the Learner whose fit failed.
        failed: items of the batch with which it did.
        freed: addresses of blocks that a cleanup frees before.
        seconds: after which no trace is begun any more.
    """
    try:
        source = LearnerSource.of(learn, None)
        tracer = replace(tracer_of(source, freed=freed), until=time.monotonic() + seconds, is_last_optional=True)
        if tracer.start is None:
            return None
        return _largest(tracer, failed)
    except NbguardError:
        return None


def _largest(tracer: FitTracer, failed: int) -> int | None:
    low, high = 0, failed
    try:
        half = tracer.endless(max(1, failed // 2))
        if half.unknown:
            return None
        band = max(half.band, half.band_of((tracer.gpu.capacity or 0) - tracer.gpu.context))
        while high - low > 1 and high - low > low // 16:
            size = (low + high) // 2
            if tracer.runs(size, band):
                low = size
            else:
                high = size
    except OutOfTimeError:
        pass
    return low or None
