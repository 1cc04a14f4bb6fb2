"""Callbacks that take a share of every batch, from times made by hand."""

from __future__ import annotations

from dataclasses import replace

from nbguard.training.profiler.analysis.report import TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import slow_callbacks
from tests.profiler.analysis.timings import MS, timing


def test_a_callback_that_takes_a_share_of_a_batch_is_named() -> None:
    found = list(
        slow_callbacks(timing(forward=890 * MS, callback_Slow=90 * MS, callback_Slower=15 * MS, callback_Quick=5 * MS))
    )

    assert [(each.severity, each.what, each.time) for each in found] == [
        ("advice", "the callback `Slow` takes 90.0 ms of each batch", 90 * MS),
        ("note", "the callback `Slower` takes 15.0 ms of each batch", 15 * MS),
    ]
    assert list(slow_callbacks(timing(forward=9 * MS, callback_Recorder=MS), ("callback Recorder",))) == []


def test_a_callback_that_works_in_few_batches_costs_each_its_share() -> None:
    row = TimeRow(phase=phase_log.callback("Logs"), callback="Logs", group="batch", total=300 * MS, median=0, p95=30 * MS)
    every_tenth = Timing(
        wall=1300 * MS,
        rows=(TimeRow(phase=phase_log.FORWARD, group="batch", total=1000 * MS, median=10 * MS), row),
        batches=100,
        warm_up=3,
        step=10 * MS,
    )

    (found,) = slow_callbacks(every_tenth)

    assert (found.severity, found.time) == ("advice", 3 * MS)
    assert "on average" in found.what
    assert found.evidence.startswith("23% of a batch of 13.0 ms")
    assert list(slow_callbacks(replace(every_tenth, batches=12))) == []
    held_up = replace(row, p95=0)
    assert list(slow_callbacks(replace(every_tenth, rows=(every_tenth.rows[0], held_up)))) == []


def test_a_callback_beside_a_gpu_at_work_costs_what_this_does_not_fill() -> None:
    usual = timing(forward=890 * MS, callback_Slow=90 * MS)
    assert [each.time for each in slow_callbacks(replace(usual, busy=0.95))] == [round(0.05 * (usual.step or 0))]
    assert list(slow_callbacks(replace(usual, busy=1.0))) == []


def test_a_callback_in_validation_or_of_a_fit_without_a_step_is_no_finding() -> None:
    slow = TimeRow(phase=phase_log.callback("Slow"), group="validation", total=900 * MS, callback="Slow")
    whole = timing(forward=10 * MS)

    assert list(slow_callbacks(replace(whole, rows=(*whole.rows, slow)))) == []
    assert list(slow_callbacks(replace(timing(callback_Slow=90 * MS), step=None))) == []


def test_a_phase_that_only_reads_like_a_callback_is_none() -> None:
    named = TimeRow(phase="callback Slow", group="batch", total=900 * MS, median=90 * MS)

    assert list(slow_callbacks(replace(timing(forward=10 * MS), rows=(named,)))) == []
