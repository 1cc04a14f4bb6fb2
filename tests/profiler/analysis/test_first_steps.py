"""The first sentences of a report, from findings and times made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbguard.training.profiler.analysis.observations import first_steps
from nbguard.training.profiler.analysis.report import FitFinding, LoaderVerdict, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.checks.syncs import SyncFacts, SyncSite, sync_findings
from tests.profiler.analysis.timings import MS, timing


def test_a_fit_that_waits_is_not_said_to_stand_out_in_nothing() -> None:
    waits = LoaderVerdict(bound="data", sentence="data-bound: 8 ms to gain", gain=8 * MS)

    assert first_steps(timing(forward=10 * MS), waits, ()) == ("data-bound: 8 ms to gain",)


def test_a_fit_that_is_too_short_to_gain_anything_is_said_to_be() -> None:
    """It said "nothing stands out: Python-bound: 79% to gain"."""
    slow = LoaderVerdict(bound="Python", sentence="Python-bound: 3 ms to gain", gain=3 * MS)

    (first,) = first_steps(timing(forward=4 * MS), slow, ())  # ten batches

    assert first.startswith("nothing stands out in so short a fit; Python-bound: 3 ms to gain")


def test_what_to_do_first() -> None:
    def finding(severity: Any, what: str, time: int | None = None) -> FitFinding:
        return FitFinding(kind="x", severity=severity, what=what, evidence="", change="mend it", time=time)

    whole = timing(forward=100 * MS)
    loader = LoaderVerdict(bound="compute", sentence="compute-bound")
    found = [finding("note", "a"), finding("advice", "b", MS), finding("advice", "c", 9 * MS), finding("problem", "d")]

    assert first_steps(whole, loader, found) == ("d: mend it", "c: mend it (up to 9.00 ms of each batch, 90.0 ms of the fit)")
    assert first_steps(whole, loader, found[:2]) == ("nothing stands out: compute-bound. Of the fit's 1.00 s: 100% forward",)
    assert first_steps(Timing(wall=0, rows=(), batches=0, warm_up=0), loader, ())[0].startswith("nothing was trained here")


def test_a_fit_that_is_too_short_for_a_verdict_is_said_to_be() -> None:
    unknown = LoaderVerdict(bound="unknown", sentence="not known, because no training batch ran after the warm-up")

    (first,) = first_steps(timing(forward=100 * MS), unknown, ())

    assert first.startswith("nothing stands out; the verdict is not known, because no training batch ran after the ")


def test_a_part_that_few_batches_take_is_told_from_one_of_every_batch() -> None:
    even = timing(forward=20 * MS, callback=30 * MS)  # ten batches
    once = replace(even, rows=tuple(replace(row, median=row.median and MS) for row in even.rows))
    loader = LoaderVerdict(bound="compute", sentence="compute-bound")

    (first,) = first_steps(even, loader, ())
    assert "most batches" not in first
    (first,) = first_steps(once, loader, ())
    assert first.endswith(
        "60% callback (1.00 ms in most batches, the rest in a few), 40% forward (1.00 ms in most batches, the rest in a few)"
    )


def test_the_profiles_own_time_is_not_said_to_be_the_programs() -> None:
    own = TimeRow(phase=phase_log.OWN, group="around", total=300 * MS)
    around = TimeRow(phase=phase_log.OTHER, group="around", total=100 * MS)
    short = timing(forward=100 * MS)  # ten batches, a second
    short = replace(short, wall=1_400 * MS, rows=(*short.rows, around, own))

    (first,) = first_steps(short, LoaderVerdict(bound="compute", sentence="compute-bound"), ())

    assert first.endswith("71% forward, 21% nbguard itself, 7% around the batches")


def test_the_largest_loss_of_the_whole_fit_comes_first() -> None:
    def finding(what: str, **cost: int) -> FitFinding:
        return FitFinding(kind="x", severity="advice", what=what, evidence="", change="mend it", **cost)

    whole = timing(forward=100 * MS)  # ten batches
    loader = LoaderVerdict(bound="compute", sentence="compute-bound")
    found = [finding("small", time=5 * MS), finding("validation", total=400 * MS), finding("callback", time=30 * MS)]

    assert [sentence.partition(":")[0] for sentence in first_steps(whole, loader, found)] == ["validation", "callback", "small"]
    assert first_steps(whole, loader, found)[0] == "validation: mend it (40% of the fit)"


def test_waiting_for_data_is_ranked_with_the_rest() -> None:
    whole = timing(forward=40 * MS, wait_for_data=60 * MS)
    waits = LoaderVerdict(bound="data", sentence="data-bound", gain=60 * MS)
    metric = FitFinding(kind="x", severity="advice", what="the metrics", evidence="", change="less", total=700 * MS)

    assert first_steps(whole, waits, (metric,)) == ("the metrics: less (70% of the fit)", "data-bound")
    assert first_steps(whole, waits, ()) == ("data-bound",)


def test_a_usual_wait_for_data_that_nothing_shortens_is_said_once() -> None:
    """It said "nothing stands out: data-bound: at most 40 ms to gain"."""
    waits = LoaderVerdict(bound="data", sentence="data-bound: at most 40 ms to gain", gain=40 * MS)

    (first,) = first_steps(timing(forward=60 * MS, wait_for_data=40 * MS), waits, ())

    assert first == (
        "nothing stands out; waiting for data costs 40.0 ms of each batch's 100 ms (40%), and no setting is known to "
        "shorten it. Of the fit's 1.00 s: 60% forward, 40% wait for data"
    )


def test_a_cache_that_is_emptied_costs_more_than_the_call() -> None:
    """The driver is asked for the memory again in other phases. An H200 said "Python-bound" first, and this after it."""
    whole = replace(timing(forward=60 * MS, backward=32 * MS, other_code=8 * MS), busy=0.06)
    waits = LoaderVerdict(bound="Python", sentence="Python-bound", gain=94 * MS)
    site = SyncSite(where="In[3], line 2", own="", methods=("empty_cache",), calls=10, batches=10, waited=80 * MS)
    (emptied,) = sync_findings(SyncFacts((site,), 10), whole.step, whole.gainable)

    first, second = first_steps(whole, waits, (emptied,))

    assert first.startswith("In[3], line 2 empties the allocator's cache in every batch: remove the call")
    assert first.endswith(" (at least 8.00 ms of each batch, 80.0 ms of the fit)")
    assert second == "Python-bound"


def test_graphs_that_an_evaluation_records_are_said_after_what_has_a_figure() -> None:
    """What they cost depends on the model: no figure is known."""
    recorded = FitFinding(kind="no_grad", severity="advice", what="g", evidence="", change="mend it")
    slow = FitFinding(kind="code", severity="advice", what="c", evidence="", change="mend it", total=500 * MS)
    whole = replace(timing(forward=10 * MS), wall=1000 * MS, batches=10)

    assert [step[0] for step in first_steps(whole, None, (recorded, slow))] == ["c", "g"]
    assert first_steps(whole, None, (recorded,)) == ("g: mend it",)
