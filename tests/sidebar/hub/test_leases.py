"""Who looks, and how often they are told."""

from __future__ import annotations

from typing import Any

from nbguard.frontend.sidebar.hub.comms import LEASE, Leases


class _Way:
    packs = False

    def send(self, message: dict[str, Any]) -> None:
        raise AssertionError(message)


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_ends_by_itself() -> None:
    clock = _Clock()
    leases, channel = Leases(clock), _Way()
    assert (leases.interval, leases.channels) == (None, ())

    leases.renew("a", channel, visible=True)
    clock.now += LEASE - 1
    assert (leases.interval, leases.channels) == (0.25, (channel,))
    leases.renew("a", channel, visible=False)
    clock.now += LEASE - 1
    assert leases.interval == 1.0
    clock.now += 1
    assert (leases.interval, leases.channels) == (None, ())


def test_one_visible_view_is_enough_and_each_way_is_told_once() -> None:
    leases, panels, widget = Leases(), _Way(), _Way()
    leases.renew("a", panels, visible=False)
    leases.renew("b", panels, visible=True)
    leases.renew("c", widget, visible=False)

    assert (leases.interval, leases.channels) == (0.25, (panels, widget))
    leases.end("b")
    assert (leases.interval, leases.channels) == (1.0, (panels, widget))
    leases.end_channel(widget)
    assert leases.channels == (panels,)
    leases.clear()
    assert leases.interval is None


def test_a_status_bar_is_told_now_and_then_and_wants_no_scan() -> None:
    leases, way = Leases(), _Way()
    leases.renew("bar", way, visible=False, glance=True)

    assert (leases.interval, leases.wants_scans, leases.channels) == (5.0, False, (way,))
    leases.renew("panel", way, visible=False)
    assert (leases.interval, leases.wants_scans) == (1.0, True)
    leases.renew("panel", way, visible=True)
    assert (leases.interval, leases.wants_scans) == (0.25, True)
    leases.end("panel")
    assert (leases.interval, leases.wants_scans) == (5.0, False)


def test_made_up_names_do_not_pile_up() -> None:
    leases = Leases()
    for number in range(1000):
        leases.renew(str(number), _Way(), visible=True)

    assert len(leases.channels) == 100
