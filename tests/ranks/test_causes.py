"""Causes that no recorded job shows: a rank that has ended, and whose process is gone before the others notice."""

from __future__ import annotations

from dataclasses import replace

from nbguard.training.ranks.analysis.causes import diagnosed
from nbguard.training.ranks.analysis.facts import CollectiveCall, JobFacts, RankFacts

ECHO = "RuntimeError: Connection closed by peer [127.0.0.1]:23955"


def batches(number: int) -> tuple[CollectiveCall, ...]:
    """Return the calls of DistributedDataParallel in so many batches; gloo counts what has failed as complete."""
    return tuple(
        CollectiveCall(
            group="0", position=at, name="all_reduce", elements=21, dtype="float32", place="train.py:33", caller="DDP backward"
        )
        for at in range(1, number + 1)
    )


def test_a_rank_that_ran_out_of_batches_and_ended_is_the_cause_of_the_others_errors() -> None:
    ended = RankFacts(rank=1, world=2, state="ended", calls=batches(7), at=10.0)
    let_down = RankFacts(rank=0, world=2, state="raised", calls=batches(8), error=ECHO, error_place="train.py:33", at=11.0)

    cause = diagnosed(JobFacts(2, (let_down, ended))).faults[0]
    assert (cause.kind, cause.ranks, cause.collective, cause.place) == ("uneven batches", (1,), "all_reduce", "train.py:33")
    assert "Join([model])" in cause.remedy


def test_a_collective_that_an_error_broke_off_has_the_line_of_the_error_where_the_recorder_tells_none() -> None:
    """As where it was asked before its first dump with stacks, which takes seconds."""
    lineless = tuple(replace(call, place="", caller="") for call in batches(8))
    ended = RankFacts(rank=1, world=2, state="ended", calls=lineless[:7], at=10.0)
    let_down = RankFacts(
        rank=0,
        world=2,
        state="raised",
        calls=lineless,
        error=ECHO,
        error_place="train.py:33",
        error_caller="DDP backward",
        at=11.0,
    )

    cause = diagnosed(JobFacts(2, (let_down, ended))).faults[0]
    assert (cause.kind, cause.ranks, cause.collective, cause.place) == ("uneven batches", (1,), "all_reduce", "train.py:33")


def test_of_ranks_that_died_the_one_that_the_others_waited_for_is_the_cause() -> None:
    """As where a launcher ends the others, after one was killed."""
    others = [RankFacts(rank=rank, world=4, state="died", calls=batches(8)) for rank in (0, 2)]
    killed = RankFacts(rank=1, world=4, state="died", calls=batches(7))
    let_down = RankFacts(rank=3, world=4, state="raised", calls=batches(8), error=ECHO, at=11.0)

    cause = diagnosed(JobFacts(4, (others[0], killed, others[1], let_down))).faults[0]
    assert (cause.kind, cause.ranks) == ("died", (1,))


def test_an_echo_of_a_rank_that_raised_is_not_taken_for_uneven_batches() -> None:
    raised = RankFacts(rank=1, world=2, state="raised", calls=batches(7), error="ValueError: a broken image", at=10.0)
    let_down = RankFacts(rank=0, world=2, state="raised", calls=batches(8), error=ECHO, at=11.0)

    cause = diagnosed(JobFacts(2, (let_down, raised))).faults[0]
    assert (cause.kind, cause.ranks) == ("raised", (1,))


def test_a_rank_that_another_fault_has_ended_is_told_so_and_no_call_is_said_to_be_common() -> None:
    log = CollectiveCall(
        group="0", position=8, name="all_reduce", elements=1, dtype="float32", place="train.py:15", is_done=False
    )
    died = RankFacts(rank=0, world=2, state="died", calls=(*batches(7), log))
    let_down = RankFacts(rank=1, world=2, state="raised", calls=batches(8), error=ECHO, at=11.0)

    cause, *others = diagnosed(JobFacts(2, (died, let_down))).faults
    assert cause.kind not in ("died", "same call")
    assert [fault.kind for fault in others] == ["died"]
    assert others[0].remedy.startswith("fix the fault above first")


def test_an_error_that_several_ranks_raise_is_nobodys_echo() -> None:
    errors = (
        (0, "KeyError: 'image 7'", "train.py:9", 10.2),
        (1, "KeyError: 'image 3'", "train.py:9", 10.1),
        (2, "OSError: the disk is full", "train.py:40", 10.3),
        (3, ECHO, "train.py:33", 10.4),
    )
    job = [RankFacts(rank=n, world=4, state="raised", error=error, error_place=at, at=when) for n, error, at, when in errors]

    cause = diagnosed(JobFacts(4, tuple(job))).faults[0]
    assert (cause.kind, cause.ranks, cause.place) == ("raised", (0, 1), "train.py:9")
    assert cause.what == "ranks 0 and 1 raised the same error at `train.py:9`: KeyError: 'image 3'"
    assert cause.evidence == (
        "rank 2 raised another error at `train.py:40` after it: OSError: the disk is full",
        "the error of rank 3 came after it, and of it",
    )


def test_ranks_that_have_all_ended_are_in_order() -> None:
    ended = RankFacts(rank=0, world=2, state="ended", calls=batches(7), at=10.0)

    assert diagnosed(JobFacts(2, (ended, replace(ended, rank=1)))).faults == ()


def test_a_call_of_its_own_in_the_midst_of_the_batches_may_be_one_too_many() -> None:
    logs = CollectiveCall(
        group="0", position=8, name="all_reduce", elements=1, dtype="float32", place="train.py:50", is_done=False
    )
    waits = replace(batches(8)[-1], is_done=False)
    first = RankFacts(rank=0, world=3, state="running", calls=(*batches(7), logs))
    others = [RankFacts(rank=rank, world=3, state="running", calls=(*batches(7), waits)) for rank in (1, 2)]

    cause = diagnosed(JobFacts(3, (first, *others))).faults[0]
    assert (cause.kind, cause.ranks) == ("uneven batches", (0,))
    assert "rank 0 had fewer batches, or makes an extra call" in cause.what
    assert "where rank 0 alone makes that call, take it out of `if rank == …`" in cause.remedy


def test_groups_in_another_order_are_said_once_and_not_again_from_the_other_side() -> None:
    groups = (("0", (0, 1, 2)), ("1", (0, 1)))
    waits = CollectiveCall(group="1", position=6, name="all_reduce", place="train.py:63", is_done=False)
    common = CollectiveCall(group="0", position=1, name="broadcast", place="train.py:58")
    barrier = CollectiveCall(group="0", position=2, name="barrier", place="train.py:64", is_done=False)
    job = tuple(
        RankFacts(rank=rank, world=3, state="running", calls=(common, waits if rank == 0 else barrier), groups=groups)
        for rank in range(3)
    )

    (cause,) = diagnosed(JobFacts(3, job)).faults
    assert (cause.kind, cause.ranks) == ("order", (0, 1, 2))
