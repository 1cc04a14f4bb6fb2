"""The thread that ticks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nbguard.frontend.sidebar.hub.sampler import Sampler


def _until(true: Callable[[], bool], within: float = 20.0) -> bool:
    until = time.monotonic() + within
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    return true()


def _alive() -> bool:
    return any(thread.name == "nbguard sampler" for thread in threading.enumerate())


def test_it_ends_when_nobody_looks_and_starts_again() -> None:
    ticks: list[int] = []
    looked_at: list[float] = [0.01]
    sampler = Sampler(lambda: ticks.append(1), lambda: looked_at[0] if looked_at else None)
    assert not _alive()

    sampler.wake()
    assert _until(lambda: len(ticks) >= 3)
    looked_at.clear()
    assert _until(lambda: not _alive())
    assert not _until(lambda: _alive(), 0.05)
    looked_at.append(60.0)
    said = len(ticks)
    sampler.wake()
    assert _until(lambda: len(ticks) > said)  # at once, not after a minute
    looked_at.clear()
    sampler.end()
    assert not _alive()


def test_ticks_that_cost_too_much_become_rare_and_cheap_ones_frequent_again() -> None:
    looked_at = [0.001]
    costs = [0.004]

    def burn() -> None:
        until = time.thread_time() + costs[0]
        while time.thread_time() < until:
            pass

    sampler = Sampler(burn, lambda: looked_at[0] if looked_at else None)
    sampler.wake()
    assert _until(lambda: sampler.slowness == 8)
    costs[0] = 0.0
    assert _until(lambda: sampler.slowness == 1)
    looked_at.clear()
    sampler.end()
