"""What a tick shows where a reading fails."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Iterator

import pytest

from nbguard.frontend.sidebar.hub.tick_source import TickSource
from nbguard.frontend.sidebar.protocol.ticks import LastLook
from nbguard.memory.core.facts import AllocatorStats, Counted, DeviceFacts, TickReading
from nbguard.memory.core.requests import NewMemory, RequestLimits
from nbguard.plain_data import to_plain
from nbguard.units import GiB

GOOD = TickReading(tracked="simulated", devices=(DeviceFacts(device="simulated:0", name="a device"),), pid=1)

_STATS = AllocatorStats(
    allocated=2 * GiB, reserved=3 * GiB, peak_allocated=3 * GiB, peak_reserved=3 * GiB, active=2 * GiB, inactive_split=1
)
_NEW = NewMemory(back=0, allowed=80 * GiB, is_expandable=False, tail=0, small_tail=0)
COUNTED = TickReading(
    tracked="cuda",
    devices=(DeviceFacts(device="cuda:0", name="a device", total=8 * GiB, free=4 * GiB, allocator=_STATS, has_context=True),),
    pid=1,
    counted=(Counted(device="cuda:0", allocated=2 * GiB),),
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
    yield ([device.device for device in feed.tick(LastLook(), None, ()).devices] for _ in range(8))
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
        feed.begin_cell(n, "")
        feed.tick(LastLook(), n, ())
    limits = RequestLimits(cached=0, as_it_is=_NEW, flushed=_NEW, is_bound=False)
    look = LastLook(counted=COUNTED.counted, limits={"cuda:0": limits})
    to_plain(feed.tick(LastLook(), None, ()))

    def count(_frame: types.FrameType, event: str, _: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    tick = to_plain(feed.tick(look, None, ()))
    sys.setprofile(None)
    feed.close()

    assert tick["devices"][0]["fits"] == [4 * GiB, 4 * GiB]
    assert tick["devices"][0]["line"][4] == 2 * GiB
    assert [mark["label"] for mark in tick["marks"]] == [f"In[{n}]" for n in range(95, 100)]
    assert calls["call"] < 300
