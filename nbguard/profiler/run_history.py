"""The last runs of the cells of this process, for `--compare last`. Plain figures: nothing of the user's is held."""

from __future__ import annotations

from nbguard.profiler.analysis.fit_samples import FitSamples

_LIMIT = 20

_runs: dict[str, FitSamples] = {}


def keep(cell: str, run: FitSamples) -> None:
    """Keep the run of a cell, known by its text; the oldest go when there are too many."""
    _runs.pop(cell, None)
    _runs[cell] = run
    for oldest in list(_runs)[:-_LIMIT]:
        del _runs[oldest]


def last(cell: str) -> FitSamples | None:
    """Return the last run of a cell of this text; of a text never run, as after an edit, the last run of any cell."""
    return _runs.get(cell) or next(reversed(_runs.values()), None)


def forget() -> None:
    """Forget all runs."""
    _runs.clear()
