"""What a tick shows where a reading fails."""

from __future__ import annotations

import sys
import time
import types
from collections import Counter
from collections.abc import Iterator

import pytest

from nbguard.memory.counters import TickReading
from nbguard.memory.facts import AllocatorStats, DeviceFacts
from nbguard.sidebar.builtins import to_builtins
from nbguard.sidebar.hub.tick_source import TickSource
from nbguard.units import GiB

GOOD = TickReading(tracked="simulated", devices=(DeviceFacts(device="simulated:0", name="a device"),), pid=1)

_STATS = AllocatorStats(
    allocated=2 * GiB, reserved=3 * GiB, peak_allocated=3 * GiB, peak_reserved=3 * GiB, active=2 * GiB, inactive_split=1
)
COUNTED = TickReading(
    tracked="cuda",
    devices=(DeviceFacts(device="cuda:0", name="a device", total=8 * GiB, free=4 * GiB, allocator=_STATS, has_context=True),),
    pid=1,
)


@pytest.fixture
def asked() -> list[bool]:
    """Whether each question succeeded, in the order in which they were asked."""
    return []


@pytest.fixture
def ticks(asked: list[bool], request: pytest.FixtureRequest) -> Iterator[Iterator[list[str]]]:
    """The devices of each tick of a feed whose reading succeeds or fails as the test's parameter says."""
    answers = iter(request.param)

    def read() -> TickReading:
        asked.append(next(answers))
        if not asked[-1]:
            raise RuntimeError
        return GOOD

    feed = TickSource("boot", read)
    yield ([device.device for device in feed.tick(0, None, ()).devices] for _ in range(8))
    feed.close()


@pytest.mark.parametrize("ticks", [[True, False, False, True, False, False, False, False]], indirect=True)
def test_a_reading_that_fails_now_and_then_stands_as_it_was(ticks: Iterator[list[str]]) -> None:
    assert list(ticks) == [["simulated:0"]] * 8


@pytest.mark.parametrize("ticks", [[True, False, False, False, False, False, True]], indirect=True)
def test_one_that_always_fails_is_left_out(ticks: Iterator[list[str]], asked: list[bool]) -> None:
    shown = list(ticks)

    assert shown[:5] == [["simulated:0"]] * 5
    assert ["simulated:0"] not in shown[5:]
    assert asked == [True] + [False] * 5


def test_a_tick_makes_few_calls() -> None:
    """In a kernel that trains each finds its code out of the processor's caches: what is not called costs nothing."""
    feed, calls = TickSource("boot", lambda: COUNTED), Counter[str]()
    for n in range(100):
        feed.mark(f"In[{n}]")
        feed._history.add(time.time() - 100 + n, COUNTED.in_use)
    to_builtins(feed.tick(0, None, ()))

    def count(_frame: types.FrameType, event: str, _: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    tick = to_builtins(feed.tick(0, None, ()))
    sys.setprofile(None)
    feed.close()

    assert len(tick["devices"][0]["spark"]) > 30
    assert calls["call"] < 300  # with the line thinned anew
