"""The last runs of the cells of this process, kept for `--compare last`, and to give no advice again that did not help.

Plain figures: nothing of the user's is held.
"""

from __future__ import annotations

from collections import deque

from nbguard.training.profiler.analysis.compare import FitSamples
from nbguard.training.profiler.analysis.loader.tried import LoaderRun

_LIMIT = 20

_runs: dict[str, FitSamples] = {}
_loaders: deque[LoaderRun] = deque(maxlen=_LIMIT)


def keep(cell: str, run: FitSamples) -> None:
    """Keep the run of a cell, known by its text; the oldest go when there are too many."""
    _runs.pop(cell, None)
    _runs[cell] = run
    for oldest in list(_runs)[:-_LIMIT]:
        del _runs[oldest]


def last(cell: str) -> FitSamples | None:
    """Return the last run of a cell of this text; of a text never run, as after an edit, the last run of any cell."""
    return _runs.get(cell) or next(reversed(_runs.values()), None)


def keep_loader(run: LoaderRun) -> None:
    """Keep how the loader of a fit was set up, with the time that an epoch took."""
    _loaders.append(run)


def loaders(fit: str) -> tuple[LoaderRun, ...]:
    """Return the loaders of the last runs of a fit, known by its `LoaderRun.fit`; the latest last."""
    return tuple(run for run in _loaders if run.fit == fit)


def forget() -> None:
    """Forget all runs."""
    _runs.clear()
    _loaders.clear()
