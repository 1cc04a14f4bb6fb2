"""The queue of the hub: one job at a time, on the main thread while no cell runs, beside the cell what may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nbguard.errors import NbguardError
from nbguard.frontend.sidebar.hub.jobs import SUPERSEDED, Job, Jobs


class _Kernel:
    """A main thread that is this one: what it is to do is done by `turn`, unless a cell runs."""

    def __init__(self) -> None:
        self.busy = False
        self.calls: list[Callable[[], None]] = []
        self.done: list[tuple[str, bool]] = []
        self.failed: list[tuple[str, str]] = []
        self.queued: list[tuple[str, str]] = []
        self.event = threading.Event()
        self.jobs = Jobs(lambda: self.busy, self.calls.append)

    def job(self, rid: str, why: str = "", run: Callable[[], Any] = lambda: None, kind: str = "") -> Job:
        def work() -> None:
            run()
            self.done.append((rid, threading.current_thread() is threading.main_thread()))
            self.event.set()

        return Job(
            run=work,
            failed=lambda w: self.failed.append((rid, w)),
            rid=rid,
            title=rid,
            kind=kind,
            why=why,
            tell_queued=lambda w: self.queued.append((rid, w)),
        )

    def turn(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def test_while_no_cell_runs_the_main_thread_does_it() -> None:
    kernel = _Kernel()
    for rid in ("a", "b"):
        assert kernel.jobs.put(kernel.job(rid, "waits"))
    assert [job.phase for job in kernel.jobs.listed] == ["queued", "queued"]
    assert kernel.done == []

    kernel.turn()

    assert kernel.done == [("a", True), ("b", True)]
    assert kernel.jobs.listed == ()


def test_beside_a_cell_a_thread_does_what_may_be_done_and_ends() -> None:
    kernel = _Kernel()
    kernel.busy = True
    kernel.jobs.put(kernel.job("later", "the cell may use it"))
    kernel.jobs.put(kernel.job("now"))
    assert kernel.event.wait(20)
    kernel.jobs.join(20)

    assert kernel.done == [("now", False)]
    assert kernel.queued == [("later", "the cell may use it")]
    assert [(job.rid, job.phase, job.why) for job in kernel.jobs.listed] == [("later", "queued", "the cell may use it")]
    assert not any(thread.name == "nbguard worker" for thread in threading.enumerate())
    kernel.turn()  # as in a cell that awaits: the main thread's loop goes on, but the cell has not ended
    assert kernel.done == [("now", False)]
    kernel.busy = False
    kernel.jobs.proceed()
    kernel.turn()
    assert kernel.done[1:] == [("later", True)]


def test_a_cell_that_begins_first_makes_it_wait_and_say_so() -> None:
    kernel = _Kernel()
    kernel.jobs.put(kernel.job("a", "the cell may use it"))
    kernel.busy = True
    kernel.jobs.proceed()
    kernel.turn()

    assert (kernel.done, kernel.queued) == ([], [("a", "the cell may use it")])


def test_what_waits_can_be_dropped_by_its_name() -> None:
    kernel = _Kernel()
    kernel.jobs.put(kernel.job("a"))
    kernel.jobs.put(kernel.job("b"))
    assert not kernel.jobs.put(kernel.job("a"))

    dropped = kernel.jobs.cancel("a")
    assert dropped is not None
    assert kernel.jobs.cancel("a") is None
    kernel.turn()

    assert kernel.done == [("b", True)]


def test_too_many_are_refused() -> None:
    kernel = _Kernel()
    assert sum(kernel.jobs.put(kernel.job(str(number))) for number in range(100)) == 32


@pytest.mark.parametrize(
    ("error", "words"),
    [(NbguardError("in words"), "in words"), (KeyboardInterrupt(), "interrupted"), (ZeroDivisionError(), "ZeroDivisionError")],
)
def test_a_job_that_fails_says_so_and_the_next_one_is_done(error: BaseException, words: str) -> None:
    def fail() -> None:
        raise error

    kernel = _Kernel()
    kernel.jobs.put(kernel.job("a", run=fail))
    kernel.jobs.put(kernel.job("b"))
    kernel.turn()

    assert [rid for rid, _ in kernel.failed] == ["a"]
    assert words in kernel.failed[0][1]
    assert kernel.done == [("b", True)]


def test_the_newest_of_a_kind_that_waits_is_done_and_the_others_are_told() -> None:
    kernel = _Kernel()
    for rid, kind in (("a", "plan"), ("b", "why"), ("c", "plan"), ("d", ""), ("e", "plan"), ("f", "")):
        assert kernel.jobs.put(kernel.job(rid, kind=kind))
    kernel.turn()

    assert [rid for rid, _ in kernel.done] == ["b", "d", "e", "f"]
    assert kernel.failed == [("a", SUPERSEDED), ("c", SUPERSEDED)]


@pytest.mark.parametrize("busy", [False, True])
def test_a_flood_is_done_in_part_and_each_request_is_answered(busy: bool) -> None:
    """However the main thread's turns fall between the requests."""
    kernel = _Kernel()
    kernel.busy = busy
    refused = []
    for number in range(5000):
        if not kernel.jobs.put(kernel.job(str(number), kind=f"kind {number % 3}")):
            refused.append(str(number))
        kernel.turn()
    while kernel.jobs.listed:
        kernel.turn()
        time.sleep(0.01)
    kernel.jobs.join(20)

    assert len(kernel.done) <= 40  # of a machine on which the flood stops now and then
    assert sorted([rid for rid, _ in kernel.done] + [rid for rid, _ in kernel.failed] + refused) == sorted(
        map(str, range(5000))
    )
    assert {"4997", "4998", "4999"} <= {rid for rid, _ in kernel.done}
