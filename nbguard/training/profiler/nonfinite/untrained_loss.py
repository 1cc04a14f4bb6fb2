"""The loss without a backward pass, because the user's own check for NaN left the batch before it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.attributes import attribute_of
from nbguard.memory.scan.heap.graphs import sequence_of


def loss_of_learner(learner: Any) -> Any:
    """Return the latest loss of a Learner that trains; None where it has none."""
    return attribute_of(learner, "loss_grad") if attribute_of(learner, "training") is True else None


def losses_left(torch: Any, error: BaseException | None, since: int) -> Iterator[Any]:
    """Yield single numbers with a graph, first in the user's frames that an error left, then among the names of cells.

    `since`: number of the operation before the first of them. `error` ended the fit, or is None.
    """
    for namespace in (*_frames(error), vars(sys.modules["__main__"])):
        for value in [*namespace.values()]:
            is_number = type(value) is torch.Tensor and not value.dim() and value.is_floating_point()
            if is_number and value.grad_fn is not None and sequence_of(value.grad_fn) >= since:
                yield value


def _frames(error: BaseException | None) -> Iterator[dict[str, Any]]:
    """Yield the names of the user's frames that an error left, the innermost first."""
    sites, left = Sites(), []
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None:
        if sites.is_users(trace.tb_frame.f_code.co_filename):
            left.append(trace.tb_frame)
        trace = trace.tb_next
    yield from (frame.f_locals for frame in reversed(left))
