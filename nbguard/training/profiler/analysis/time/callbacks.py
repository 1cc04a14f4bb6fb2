"""Callbacks that take a share of every batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nbguard.training.profiler.analysis.report import FitFinding, Timing
from nbguard.units import format_time

_SHARE, _LITTLE = 0.05, 0.01
"""Least shares of a batch of a callback that is worth a change, or is mentioned."""
_NOTICED = 500_000
"""Nanoseconds of a batch: less is not mentioned."""


_ENOUGH = 40
"""Least batches whose 95th percentile speaks of several; with few, one that the machine held up is no habit."""
_RARE = 5
"""Times the median that the mean must be for a callback to be one that works in some batches only."""


def slow_callbacks(timing: Timing, of_library: Collection[str] = ()) -> Iterator[FitFinding]:
    """Yield a finding for each callback that takes a share of a batch.

    Args:
        timing: where the time went.
        of_library: phases of callbacks without which a library does not train: nothing that the user can leave out.
    """
    if not timing.step:
        return
    for row in timing.rows:
        if row.group != "batch" or not row.callback or row.phase in of_library:
            continue
        usual, mean = row.median or 0, row.total // max(timing.batches, 1)
        is_rare = timing.batches >= _ENOUGH and (row.p95 or 0) > mean > _RARE * usual  # at every n-th batch
        time = mean if is_rare else usual
        step = timing.step + time - usual
        if timing.busy is not None and not is_rare:  # no GPU is at work during events that most batches lack
            time = min(time, timing.gainable)
        share = time / step
        if share < _LITTLE or time < _NOTICED:
            continue
        name = row.callback
        some = " on average, though it works in some only" if is_rare else ""
        yield FitFinding(
            kind="callback",
            severity="advice" if share >= _SHARE else "note",
            what=f"the callback `{name}` takes {format_time(time)} of each batch{some}",
            evidence=f"{share:.0%} of a batch of {format_time(step)}, {format_time(row.total)} in all",
            change=f"do less in `{name}`, or do it {'more rarely' if is_rare else 'every n-th batch'}: `if "
            "self.train_iter % 50 == 0`",
            time=time,
        )
