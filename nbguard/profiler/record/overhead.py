"""The cost of one entry of the log, measured as in a fit: in caches that are full of the user's data."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

from nbguard.profiler.analysis.time import phases
from nbguard.profiler.record.recorder import Recorder
from nbguard.profiler.record.torch_loop import TorchLoop

_FILL = 1 << 20
"""Bytes that are read to fill the caches, as a batch of the user's does between two marks."""
_ROUNDS = 16


def cost_of_a_mark() -> int:
    """Return the nanoseconds that one mark costs a fit, with the calls that patched functions only pass on.

    Of two patched functions one comes after the user's work, which has filled the caches, and one directly after the other; for
    every two marks there is about one call that is only passed on.
    """
    loop = TorchLoop(Recorder())
    plain, marked = _nothing, loop.timed(phases.OTHER)(_nothing)

    def passed() -> None:
        loop.inside += 1
        marked()
        loop.inside -= 1

    def ours() -> None:
        for _ in range(2):
            marked()
            passed()

    def without() -> None:
        for _ in range(2):
            plain()
            plain()

    memory = bytearray(_FILL)
    taken = [_cold(ours, memory) - _cold(without, memory) for _ in range(_ROUNDS)]
    return max(0, round(median(taken)) // 4)


def _cold(act: Callable[[], None], memory: bytearray) -> int:
    """Return the nanoseconds that a call takes after something else has filled the caches."""
    memory.count(1)
    start = perf_counter_ns()
    act()
    return perf_counter_ns() - start


def _nothing() -> None:
    pass
