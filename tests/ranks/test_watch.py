"""`watch_ranks` in this process: where it does nothing, what it refuses, and the log that outlives a process."""

from __future__ import annotations

import itertools
import os
from array import array
from pathlib import Path

import pytest

import nbguard
from nbguard.errors import NbguardError
from nbguard.training.profiler.instruments.rank_watch import RankLiveness
from nbguard.training.ranks import job_board
from nbguard.training.ranks.analysis.facts import CollectiveCall
from nbguard.training.ranks.call_hook import KEPT, NUMBERS
from nbguard.training.ranks.job_board import open_board
from nbguard.training.ranks.rank import Rank
from nbguard.training.ranks.rank_file import RankFile, leave


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place where jobs have their folders."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


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


def test_a_file_of_a_rank_keeps_its_last_calls_and_who_made_them(tmp_path: Path) -> None:
    file = RankFile.create(tmp_path / "3-1.rank")
    for position in range(1, 101):
        number, entry = next(file.calls.numbers), file.calls.entry(call(position), f"train.py:{position}".encode())
        at, returned = number % KEPT * NUMBERS, number if position < 100 else 0
        file.calls.slots[at : at + NUMBERS] = memoryview(array("q", (number, position, entry, returned)))
    assert (file.calls.count, file.calls.waits()) == (100, True)
    file.write("facts", "ä" * 1000)

    kept = RankFile(file.path)
    assert (kept.process.pid, kept.state, kept.is_alive) == (os.getpid(), "running", True)
    assert [each.position for each in kept.calls.read()] == list(range(37, 101))
    assert [each.is_done for each in kept.calls.read()] == [True] * 63 + [False]
    assert kept.calls.read()[-1].place == "train.py:100"
    assert (kept.read("facts"), kept.read("message")) == ("ä" * 1000, None)

    file.note_state("ended")
    file.raise_alarm(12.5)
    file.unlink()  # the name goes, the file stays with those that have mapped it
    assert (kept.state, kept.alarm, kept.is_alarm_near) == ("ended", 12.5, True)
    file.close()
    kept.close()


def test_a_text_that_is_just_being_written_is_none(tmp_path: Path) -> None:
    file = RankFile.create(tmp_path / "0-1.rank")
    file.write("facts", "one")
    data = file.path.read_bytes()
    file.close()
    file.path.write_bytes(data.replace(b"one", b"onx"))

    assert RankFile(file.path).read("facts") is None


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 4_000_000])
def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "0-1.rank"
    path.write_bytes(content)

    with pytest.raises(OSError, match=r"0-1\.rank"):
        RankFile(path)


def test_names_go_once_all_ranks_have_mapped_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    board = open_board(Rank(0, 2))
    (named,) = tmp_path.glob("*/0-*.rank")
    other = RankFile.create(named.with_name(named.name.replace("0-", "1-", 1)))  # as rank 1 does
    other.seen_by(1)
    board.own.seen_by(1)
    board.join()

    assert list(tmp_path.iterdir()) == []
    assert board.others().keys() == {1}
    other.raise_alarm(9.0)
    assert board.alarm() == 9.0
    board.release()


def test_a_rank_that_leaves_the_last_board_takes_no_folder_from_the_next(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RankFile.create
    left: list[Path] = []

    def late(path: Path) -> RankFile:
        if not left:
            left.append(path.parent)
            leave(path.parent)
        return create(path)

    monkeypatch.setattr(RankFile, "create", late)
    board = open_board(Rank(rank=0, world=2))
    try:
        assert board.own.path.exists()
        assert left
    finally:
        board.release()


def test_the_first_rank_that_has_ended_leaves_the_names_of_ranks_whose_fit_goes_on(
    jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_board, "_boards", itertools.repeat(1))
    first, second = (job_board.JobBoard(Rank(rank=rank, world=4)) for rank in (0, 1))
    fit = RankLiveness(first, 1)
    for board in (first, second):
        board.own.note_state("ended")  # the watch for hangs, which ends before the ranks exchange what they have seen

    second.release()
    assert first.own.path.exists()  # a third rank may not have mapped it yet

    fit.close()
    first.release()
    assert list(jobs.iterdir()) == []
