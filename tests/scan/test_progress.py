"""Reports of work that takes long: words now and then to whoever waits in the same thread, and to nobody else."""

from __future__ import annotations

import threading

import pytest

from nbguard.memory.scan import pause


def test_a_stage_is_reported_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(pause.time, "perf_counter", lambda: now[0])

    with pause.reported(said.append):
        pause.stage("quick")
        now[0] = 1.5
        pause.stage("tracing")
        pause.report(12_000)  # just told
        now[0] = 3.0
        pause.report(12_000)

    assert said == ["nbguard is tracing…", "nbguard is scanning: 12,000 objects…"]


def test_who_waits_within_is_told_and_then_who_waited_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "_SECONDS_BEFORE_PROGRESS", -1.0)
    outer, inner = list[str](), list[str]()

    with pause.reported(outer.append):
        with pause.reported(inner.append):
            pause.stage("one")
        pause.stage("two")
        thread = threading.Thread(target=pause.stage, args=("three",))
        thread.start()
        thread.join()
    pause.stage("four")

    assert (inner, outer) == (["nbguard is one…"], ["nbguard is two…"])
