"""The largest batch that a fit runs with on a GPU, found by traces of it with the GPU's capacity in the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nbguard.training.prediction.prediction import (
    LargestBatch,
)
from nbguard.training.prediction.trace import FailedFitError, FitTrace, FitTracer

_GROWTH = 8
"""Factor of the batch's growth from one trace to the next until a peak exceeds the GPU."""
_FRAGMENTED = 0.97
"""Share of the GPU that tensors can fill; the rest is free between them."""
_STEP = 0.04
"""Share of the estimate that is the search's next step: predicted peaks grow by steps, and nearly in a line."""


def largest_batch(tracer: FitTracer, endless: FitTrace) -> LargestBatch:
    """Return the largest batches that the fit runs with, and is sure to run with, on the tracer's GPU.

    Each answer is verified by a trace of its own, and so is the next larger batch.

    Args:
        tracer: traces the fit; its GPU has a capacity.
        endless: the trace of one batch size without a limit, to begin with.
    """
    tracer = replace(tracer, is_last_optional=True)
    size, most = endless.sizes[0], endless.items
    tried: dict[int, bool] = {}

    def runs(items: int) -> bool:
        try:
            tried[items] = tracer.runs(items, 0)
        except FailedFitError:  # of so few items, as batch norm refuses one
            tried[items] = False
        return tried[items]

    def is_sure(items: int) -> bool:
        try:
            return tracer.answer(items, tracer.endless(items))[0] is True
        except FailedFitError:
            return False

    limit = _search(runs, _estimate(tracer, endless, size, most), most)
    if endless.unknown:
        return LargestBatch(sure=None, limit=limit, is_whole_set=limit == most, traces=len(tried))
    sure = limit if not limit or is_sure(limit) else _search(is_sure, int(limit * 0.94), limit - 1)
    return LargestBatch(sure=sure, limit=limit, is_whole_set=limit == most, traces=len(tried))


def _estimate(tracer: FitTracer, endless: FitTrace, size: int, most: int) -> int:
    """Return the size at which the allocated peak fills the GPU, by a line between two traces without a limit around it.

    Small batches change no peak: the optimizer's step or a workspace makes it. So sizes grow until the room is exceeded.
    """
    room = (tracer.gpu.capacity or 0) - tracer.gpu.context
    low, filled = (1, endless.model) if endless.peak_allocated > room else (size, endless.peak_allocated)
    high = size if low < size else min(size * _GROWTH, most)
    while high > low:
        peak = endless.peak_allocated if high == size else tracer.endless(high).peak_allocated
        per_item = (peak - filled) / (high - low)
        line = int(_FRAGMENTED * (low + (room - filled) / per_item)) if per_item > 0 else most
        if peak > room or high == most:
            return max(1, min(line, high))
        low, filled, high = high, peak, min(most, high * _GROWTH, max(high + 1, 2 * line))
    return low


def _search(holds: Callable[[int], bool], estimate: int, most: int) -> int:
    """Return the largest number up to `most` that holds, 0 if none does: outwards from the estimate, then by halves."""
    low, high, step = 0, most + 1, max(1, int(_STEP * estimate))
    is_low_tried = is_high_tried = False
    while high - low > 1:
        if is_low_tried and is_high_tried:
            at = (low + high) // 2
        elif is_low_tried or is_high_tried:
            at = min(low + step, high - 1) if is_low_tried else max(high - step, low + 1)
            step *= 2
        else:
            at = min(max(estimate, low + 1), high - 1)
        if holds(at):
            low, is_low_tried = at, True
        else:
            high, is_high_tried = at, True
    return low
