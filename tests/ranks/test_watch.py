"""`watch_ranks` in this process: where it does nothing, what it refuses, and the log that outlives a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nbguard
from nbguard.errors import NbguardError
from nbguard.ranks.analysis.facts import CollectiveCall
from nbguard.ranks.call_log import CallLog, read_log


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "60", None, True])
def test_a_timeout_that_cannot_be_is_one_line(timeout: object) -> None:
    with pytest.raises(NbguardError, match="give seconds, as in") as refused:
        nbguard.watch_ranks(timeout)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def test_a_program_of_one_process_is_left_alone(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with nbguard.watch_ranks() as watch:
        pass

    assert watch.diagnosis is None
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_user_passes(alone: None) -> None:
    with pytest.raises(ZeroDivisionError), nbguard.watch_ranks():
        raise ZeroDivisionError


def call(position: int, name: str = "all_reduce") -> CollectiveCall:
    return CollectiveCall(group="0", position=position, name=name, elements=4, dtype="float32", is_done=False)


def test_the_log_keeps_the_last_calls_and_who_wrote_them(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "3-1.calls", 3)
    for position in range(1, 101):
        number = log.begin(call(position), f"train.py:{position}".encode())
        if position < 100:
            log.end(number)

    kept = read_log(log.path)
    assert kept is not None
    assert (kept.process.pid, kept.rank, kept.state) == (os.getpid(), 3, "running")
    assert [each.position for each in kept.calls] == list(range(37, 101))
    assert [each.is_done for each in kept.calls] == [True] * 63 + [False]
    assert kept.calls[-1].place == "train.py:100"

    log.leave("ended")
    ended = read_log(log.path)
    assert ended is not None
    assert ended.state == "ended"
    log.close()


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 20_000])
def test_a_damaged_log_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "0-1.calls"
    path.write_bytes(content)

    assert read_log(path) is None
    assert read_log(tmp_path / "missing") is None
