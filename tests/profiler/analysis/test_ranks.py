"""What ranks tell: who stands out among them, and who has not told anything."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nbguard.plain_data import to_plain
from nbguard.training.profiler.analysis.ranks import (
    GradientSums,
    Pulse,
    RankMessage,
    RankObservations,
    message_of,
    rank_report,
    sums_finding,
)
from nbguard.training.profiler.analysis.report import FitFinding, RankReport, RankRow, Setting
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.ranks.analysis.facts import RankFault

MS = 1_000_000
SECOND = 1_000 * MS
GIB = 1 << 30
UNCOMPARED = "The ranks' models were not compared; `%%profile_fit --check-ranks 100` does so bit by bit."


def _row(rank: int, **figures: object) -> RankRow:
    """A rank like the others: 2 ms of a step of 40 ms wait for data, 20 ms are the backward pass."""
    row = RankRow(
        rank=rank,
        host="one",
        pid=100 + rank,
        state="complete",
        batches=50,
        step=40 * MS,
        wait=2 * MS,
        backward=20 * MS,
        peak=4 * GIB,
        device="cuda:0",
    )
    return replace(row, **figures)  # type: ignore[arg-type]


def _report(*rows: RankRow, pulses: tuple[Pulse, ...] = (), world: int = 4, waited: int = 10 * SECOND) -> RankReport:
    messages = tuple(RankMessage(row) for row in rows)
    return rank_report(RankObservations(world=world, host="one", messages=messages, pulses=pulses, waited=waited))


def _pulse(**facts: object) -> Pulse:
    return replace(Pulse(rank=3, pid=77, batch=5, phase=phase_log.LOSS, age=200 * MS, is_alive=True), **facts)  # type: ignore[arg-type]


def _only(report: RankReport) -> FitFinding:
    (found,) = report.findings
    return found


def test_ranks_that_are_alike_give_no_finding() -> None:
    report = _report(*(_row(rank, step=(40 + rank % 2) * MS, peak=4 * GIB + rank) for rank in range(4)))

    assert (report.findings, report.note) == ((), UNCOMPARED)
    assert [row.rank for row in report.rows] == [0, 1, 2, 3]


def test_the_cause_for_which_ranks_waited_in_vain_comes_first() -> None:
    left_out = RankFault(
        kind="left out",
        ranks=(1,),
        collective="all_reduce",
        place="train.py:13",
        last_common=7,
        what="rank 1 left out the `all_reduce` that rank 0 waits for at `train.py:13`",
        remedy="call the same collectives on all ranks",
    )
    rows = (_row(0, state="error: KeyboardInterrupt"), _row(1, device="cpu", peak=1 * GIB))
    report = rank_report(RankObservations(world=2, host="one", messages=tuple(map(RankMessage, rows)), hang=left_out))

    assert (report.findings[0].severity, report.findings[0].what) == ("problem", left_out.what)
    assert report.findings[0].change == left_out.remedy


def test_the_straggler_is_told_from_those_who_wait_for_it() -> None:
    others = [_row(rank, step=60 * MS, backward=40 * MS) for rank in (0, 1, 3)]
    slow = _row(2, step=60 * MS, wait=22 * MS, backward=20 * MS)

    found = _only(_report(*others, slow))

    assert (found.what, found.time) == ("Rank 2 is the straggler", 20 * MS)
    assert found.evidence == (
        "40.0 ms per batch outside the backward pass, the other ranks 20.0 ms; 20.0 ms of the difference is waiting for data. "
        "The others wait for it, so their backward pass takes 20.0 ms longer than its own"
    )
    assert "num_workers" in found.change


def test_a_straggler_that_computes_longer_is_not_sent_to_its_data() -> None:
    found = _only(_report(_row(0), _row(1), _row(2), _row(3, step=50 * MS)))

    assert "waiting for data" not in found.evidence
    assert found.change == "look for other programs on cuda:0 of one, and for work that only this rank does"


def test_a_longer_part_that_nobody_waits_for_is_no_straggler() -> None:
    assert not _report(_row(0), _row(1), _row(2), _row(3, backward=18 * MS, step=43 * MS)).findings


def test_ranks_without_times_are_not_compared() -> None:
    assert not _report(*(_row(rank, step=None, wait=None, backward=None, peak=None) for rank in range(4))).findings


def test_more_memory_is_named_with_how_much() -> None:
    found = _only(_report(_row(0, peak=5 * GIB), _row(1), _row(2), _row(3)))

    assert (found.what, found.nbytes) == ("Rank 0 takes more memory", GIB)


def test_versions_that_differ_are_a_problem_and_a_variable_that_one_rank_lacks_is_named() -> None:
    said = (
        RankMessage(_row(0), (Setting("torch version", "2.13.0", is_version=True), Setting("NCCL_P2P_DISABLE", "1"))),
        RankMessage(_row(1), (Setting("torch version", "2.12.0", is_version=True),)),
        RankMessage(_row(2), (Setting("torch version", "2.13.0", is_version=True),)),
    )

    version, variable = rank_report(RankObservations(world=3, host="one", messages=said)).findings

    assert (version.severity, version.evidence) == ("problem", "rank 0, 2: 2.13.0; rank 1: 2.12.0")
    assert (variable.severity, variable.evidence) == ("advice", "rank 0: 1; rank 1, 2: not set")
    assert variable.change == "set `NCCL_P2P_DISABLE` alike where the ranks are launched"


@pytest.mark.parametrize(
    ("name", "is_version", "severity"),
    [
        ("backend", False, "problem"),
        ("GPU model", False, "advice"),
        ("NVIDIA driver version", True, "advice"),
        ("NCCL version", True, "problem"),
    ],
)
def test_what_the_hosts_have_is_compared_where_it_is_known(name: str, is_version: bool, severity: str) -> None:
    values = ("a", "b", None)
    said = tuple(
        RankMessage(_row(rank), (Setting(name, value, is_version=is_version),) if value else ())
        for rank, value in enumerate(values)
    )

    (found,) = rank_report(RankObservations(world=3, host="one", messages=said)).findings
    assert (found.severity, found.what, found.evidence) == (
        severity,
        f"{name} is not the same on all ranks",
        "rank 0: a; rank 1: b",
    )
    assert found.change
    alike = (said[0], replace(said[1], environment=said[0].environment), said[2])
    assert not rank_report(RankObservations(world=3, host="one", messages=alike)).findings


def test_batches_are_only_compared_where_the_fit_came_to_its_end() -> None:
    rows = [_row(0), _row(1), _row(2)]

    assert "different numbers of batches" in _only(_report(*rows, _row(3, batches=49))).what
    assert not _report(*rows, _row(3, batches=7, state="interrupted")).findings


@pytest.mark.parametrize(
    ("pulse", "state", "what"),
    [
        (_pulse(is_alive=False), "died in batch 5, after loss", "Rank 3 died in batch 5, after loss"),
        (
            _pulse(is_alive=False, phase=""),
            "died in batch 5, before its data came",
            "Rank 3 died in batch 5, before its data came",
        ),
        (_pulse(age=9 * SECOND), "no progress for 9.00 s in batch 5, after loss", "Rank 3 hangs in batch 5, after loss"),
        (_pulse(age=4 * SECOND), "still running, in batch 5, after loss", "Rank 3 still runs"),
        (
            _pulse(batch=0, age=9 * SECOND),
            "no progress for 9.00 s before its first batch",
            "Rank 3 hangs before its first batch",
        ),
    ],
)
def test_a_silent_rank_has_the_state_that_its_last_sign_of_life_tells(pulse: Pulse, state: str, what: str) -> None:
    report = _report(_row(0), _row(1), _row(2), pulses=(pulse,))

    assert report.rows[3].state == state
    assert _only(report).what == what
    assert report.note == f"1 of 4 ranks did not report; waited 10.0 s. {UNCOMPARED}"


def test_what_is_told_survives_the_way() -> None:
    told = RankMessage(_row(1), (Setting("NCCL_DEBUG", "INFO"),))

    assert message_of(json.dumps(to_plain(told))) == told
    assert message_of("{}") is None
    assert message_of("no JSON") is None
    assert message_of('{"row": {"rank": 1, "colour": 2}, "environment": []}') is None


def test_sums_of_gradients_have_their_bytes_their_time_and_where_that_is_much_a_line_that_makes_them_smaller() -> None:
    sums = GradientSums(nbytes=64 << 20, calls=3, backend="nccl", time=40_000_000, overlap=30_000_000)

    few, many = sums_finding(sums, 1, 100_000_000), sums_finding(replace(sums, overlap=0), 2, 100_000_000)
    assert "64 MiB" in few.what
    assert "3 all-reduces within one host by nccl; 40.0 ms per step, 30.0 ms of it" in few.evidence
    assert few.change == ""
    assert "over 2 hosts by nccl" in many.evidence
    assert "adds up within each host before" in many.evidence
    assert "model.register_comm_hook" in many.change
