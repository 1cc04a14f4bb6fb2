"""The profile of a fit as blocks, with its ending and the first things to do, then the figures behind them."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core import advice
from nbguard.render.blocks import Block, FactLines, Fold, Head, Line, Listing, Picture
from nbguard.render.words import NAME, clean
from nbguard.training.profiler.analysis.report import Ending, FitReport, MemoryReport
from nbguard.training.profiler.render.chart import memory_blocks, memory_line, step_picture
from nbguard.training.profiler.render.rows import (
    comparison_blocks,
    finding_points,
    loader_blocks,
    operator_blocks,
    overhead_sentence,
    rank_blocks,
    remedy_points,
    settings_table,
)
from nbguard.training.profiler.render.time import brief_time_blocks, epoch_blocks, time_blocks
from nbguard.units import counted, format_time

_ENDINGS: dict[Ending, str] = {
    "complete": "complete",
    "error": "it failed",
    "interrupted": "interrupted",
    "out of memory": "out of memory",
    "stopped at NaN": "stopped at NaN",
}


def fit_blocks(report: FitReport, *, whole: bool = True) -> Iterator[Block]:
    """Yield the profile: the answer on a screen, then all figures; not `whole`: these behind a line.

    Of all figures a terminal shows phases of 1 % of the time and more, a notebook those from 0.1 % on.
    """
    for earlier in report.earlier:
        yield from fit_blocks(earlier, whole=whole)
    if _is_empty(report):
        yield Line(f"{report.title} · {_ending(report)} · {report.first[0]}")
        return
    yield _head(report)
    if len(report.first) == 1:
        yield FactLines((("first", report.first[0]),))
    elif report.first:
        yield Listing(title="what to do first", sentences=report.first, is_numbered=True)
    if whole:
        yield from _figures(report)
        return
    yield from _brief(report)
    more = _unsaid(report)
    yield Fold("all figures", tuple(_figures(report)), f"{more}" + advice.LAST_FIT.code + " shows all")


def _brief(report: FitReport) -> Iterator[Block]:
    """Yield the parts to be read first: problems, the time in a few rows, the memory, and the parts asked for by options."""
    if problems := [finding for finding in report.findings if finding.severity == "problem"]:
        yield finding_points(problems)
    yield from brief_time_blocks(report.timing)
    yield memory_line(report.memory)
    yield from _loader(report, whole=False)
    yield from _others(report)
    if report.files:
        yield FactLines((("written", " · ".join(report.files)),))
    if report.notes:
        yield Listing(sentences=report.notes)


def _loader(report: FitReport, *, whole: bool) -> Iterator[Block]:
    """Yield the verdict on the loader, unless the first sentences say it; of trials, or where `whole`, all that is known."""
    loader = report.loader
    if loader is None:
        return
    is_said = any(loader.sentence in sentence for sentence in report.first)
    if whole or loader.trials or loader.tuning:
        yield from loader_blocks(loader, is_said=is_said)
    elif not is_said:
        yield FactLines((("verdict", loader.sentence),))


def _others(report: FitReport) -> Iterator[Block]:
    """Yield the operators, the comparison with other ranks and with the run before, where there are any."""
    yield from operator_blocks(report.operators)
    if report.ranks is not None:
        yield from rank_blocks(report.ranks)
    if report.comparison is not None:
        yield from comparison_blocks(report.comparison)


def _unsaid(report: FitReport) -> str:
    """Return how many findings the brief form leaves out, and a mark behind it; empty if none."""
    number = sum(finding.severity != "problem" for finding in report.findings)
    return f"{counted(number, 'more finding')}; " if number else ""


def _figures(report: FitReport) -> Iterator[Block]:
    timing, memory = report.timing, report.memory
    yield from time_blocks(timing)
    if not (isinstance(memory, MemoryReport) and len(memory.points) > 1):
        yield Picture(step_picture(timing.rows))
    yield from _loader(report, whole=True)
    yield from memory_blocks(memory, timing.epochs)
    if report.findings:
        yield finding_points(report.findings)
    if report.remedies:
        yield remedy_points(report.remedies)
    yield from _others(report)
    yield from epoch_blocks(timing.epochs)
    if report.settings:
        yield settings_table(report.settings)
    yield FactLines(tuple(_last(report)))
    if report.notes:
        yield Listing(sentences=report.notes)


def _is_empty(report: FitReport) -> bool:
    """Say whether a cell, however it ended, had no fit in it, no call of a model and no pass over a loader."""
    has_passes = report.timing.batches or report.timing.epochs or isinstance(report.memory, MemoryReport)
    return not (has_passes or report.missed or report.findings or report.files or report.notes)


def _ending(report: FitReport) -> str:
    return _ENDINGS[report.ending] + (f" ({report.error})" if report.error else "")


def _head(report: FitReport) -> Head:
    ending = _ending(report)
    if report.missed:
        batches = counted(report.missed, "batch was", "batches were")
        ending = f"{batches} over when the profile began{'' if report.ending == 'complete' else f'; {ending}'}"
    batches = counted(report.timing.batches, "training batch", "training batches")
    launch = f" · {clean(report.ranks.launch, NAME)}" if report.ranks is not None and report.ranks.launch else ""
    return Head(report.title, ending, f"{format_time(report.timing.wall)} · {batches}{launch}", report.is_partial)


def _last(report: FitReport) -> Iterator[tuple[str, str]]:
    yield "nbguard", overhead_sentence(report.overhead)
    if report.files:
        yield "written", " · ".join(report.files)
