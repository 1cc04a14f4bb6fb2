"""The figures that logs of experiments take, from reports made by hand."""

from __future__ import annotations

from dataclasses import replace

from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.compare import Figure, figures, summary
from nbguard.training.profiler.analysis.report import TimeRow
from nbguard.training.profiler.analysis.time import phase_log
from tests.profiler.fit_reports import healthy, rich


def test_a_key_has_the_unit_and_the_phase_and_a_count_has_none() -> None:
    assert Figure(name="step_median", value=1.0, unit="seconds").key == "nbguard/step_median_seconds"
    assert Figure(name="batches", value=3).key == "nbguard/batches"
    assert Figure(name="phase_total", value=1.0, unit="seconds", of="forward").key == "nbguard/phase_total_seconds/forward"


def test_times_are_seconds_and_the_phases_of_a_fit_add_up_to_it() -> None:
    report = rich()
    values = {(figure.key, figure.epoch): figure.value for figure in figures(report)}

    assert values["nbguard/wall_seconds", None] == report.timing.wall / 1e9
    shares = [figure.value for figure in figures(report) if figure.full_name == "phase_share_ratio"]
    assert abs(sum(shares) - 1) < 1e-9
    assert values["nbguard/findings", None] == len(report.findings)
    assert values["nbguard/is_partial", None] == int(report.is_partial)


def test_an_unknown_figure_is_left_out() -> None:
    report = replace(healthy(), memory=Unavailable("memory", "no counter"), loader=None)
    report = replace(report, timing=replace(report.timing, step=None, step_p95=None, first=None, busy=None, epochs=()))
    names = {figure.name for figure in figures(report)}

    assert not names & {"step_median", "step_p95", "first_batch", "gpu_busy", "loader_gain", "memory_peak", "epoch_total"}
    assert {"wall", "batches", "overhead"} <= names


def test_phases_of_the_same_name_in_training_and_validation_are_told_apart() -> None:
    forward = [TimeRow(phase=phase_log.FORWARD, group=group, total=10**9) for group in ("batch", "validation", "around")]
    report = replace(healthy(), timing=replace(healthy().timing, rows=tuple(forward)))
    totals = {figure.of for figure in figures(report) if figure.name == "phase_total"}

    assert totals == {"forward", "validation forward", "around forward"}


def test_the_summary_has_every_sentence_of_the_report() -> None:
    report = rich()
    text = summary(report)

    assert text.startswith(f"**{report.title}**: {report.ending}")
    assert all(f"{number}. {sentence}" in text for number, sentence in enumerate(report.first, 1))
    assert all(finding.what in text and finding.change in text for finding in report.findings)
    assert all(note in text for note in report.notes)
