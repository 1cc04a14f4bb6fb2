"""The profile of a fit as blocks, with its ending and the first things to do, then the figures behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nbguard.memory.core import advice
from nbguard.render.html import Block, FactLines, Fold, Head, Line, Listing, Picture, Point, Points, Table, TableRow
from nbguard.render.markup import NAME, clean
from nbguard.texts import joined
from nbguard.training.profiler.analysis.operators import OperatorTable
from nbguard.training.profiler.analysis.report import (
    Comparison,
    Ending,
    FitFinding,
    FitReport,
    LoaderVerdict,
    MemoryReport,
    Overhead,
    RankReport,
    RankRow,
    Remedy,
    RunChange,
    Setting,
    WorkerTrial,
    gravest_first,
)
from nbguard.training.profiler.analysis.slowest import FileReading, LoaderPart, StoragePace
from nbguard.training.profiler.render.chart import (
    brief_time_blocks,
    epoch_blocks,
    memory_blocks,
    memory_line,
    step_picture,
    time_blocks,
)
from nbguard.units import counted, format_bytes, format_time

# --- The loader's verdict, findings, remedies, ranks, operators and the comparison of a profile, in words and figures.


# --- The operators of a fit that take most time, as a table.


def operator_blocks(table: OperatorTable | None) -> Iterator[Block]:
    """Yield the table, and a note on it; nothing where it was not asked for."""
    if table is None:
        return
    if table.rows:
        yield _rows(table)
    if table.note:
        yield FactLines((("operators", table.note),))


def _rows(table: OperatorTable) -> Table:
    batches = max(table.batches, 1)
    whole = table.device or table.cpu or 1
    rows = []
    for row in table.rows:
        name = row.name.removeprefix("aten::") + (" (backward)" if row.is_backward else "")
        share = (row.device if table.device else row.cpu) / whole
        times = [format_time(row.cpu // batches)]
        if table.device:
            times.insert(0, format_time(row.device // batches))
        calls = f"{row.calls / batches:.3g}"
        rows.append(TableRow(cells=(name, *times, f"{share:.0%}", calls, row.module, row.site)))
    columns = ("on the GPU", "on the CPU") if table.device else ("on the CPU",)
    title = f"operators by their own time, of {counted(table.batches, 'batch', 'batches')}"
    figures = tuple(range(1, len(columns) + 3))
    return Table(names=(title, *columns, "share", "calls", "module", "line"), rows=tuple(rows), figures=figures)


_RANKS_SHOWN = 16
_READ_SHOWN = 64 * 1024  # bytes of a batch
_RANK_NAMES = ("rank", "where", "device", "batches", "step", "waits", "backward", "peak", "ended")


def loader_blocks(loader: LoaderVerdict, *, is_said: bool) -> Iterator[Block]:
    """Yield the verdict on the loader, unless it `is_said` already, the numbers of workers tried, and the advice."""
    if not is_said:
        yield FactLines((("verdict", loader.sentence),))
    if loader.parts:
        yield FactLines((("a batch", _parts(loader.parts)),))
    if loader.reading is not None and loader.reading.per_batch >= _READ_SHOWN:
        yield FactLines((("reading", _reading(loader.reading)),))
    if loader.storage is not None:
        yield FactLines((("storage", _storage(loader.storage, loader.reading)),))
    if loader.trials:
        yield _trials(loader.trials, loader.best)
    if loader.tuning:
        yield FactLines((("workers", loader.tuning),))
    if loader.advice:
        yield finding_points(loader.advice)


def _parts(parts: Sequence[LoaderPart]) -> str:
    whole = sum(part.time for part in parts)
    return " · ".join(f"{part.name} {format_time(part.time)} ({part.time / whole:.0%})" for part in parts)


def _reading(reading: FileReading) -> str:
    where = {0: "all of it was in the page cache", 100: "all of it from storage"}
    share = round(100 * reading.from_storage)
    words = where.get(share, f"{share} % of it from storage, the rest was in the page cache")
    return f"{format_bytes(reading.per_batch)} of files a batch, {format_bytes(round(reading.per_second))} a second: {words}"


def _storage(storage: StoragePace, reading: FileReading | None) -> str:
    """Return the pace of a loader's storage in words, and the share of it that the loader took."""
    by = f"{counted(storage.readers, 'reader')} of {counted(storage.files, 'file')}"
    gave = f"{format_bytes(round(storage.per_second))} a second past the page cache, by {by} ({format_bytes(storage.nbytes)})"
    if reading is None or not reading.from_storage:
        return gave
    return f"{gave}; the loader took {reading.per_second * reading.from_storage / storage.per_second:.0%} of that"


def _trials(trials: Sequence[WorkerTrial], best: int | None) -> Table:
    columns = zip(trials, _times([trial.per_batch for trial in trials]), _times([trial.first for trial in trials]), strict=True)
    rows = []
    for trial, *figures in columns:
        note = " · ".join(word for word in ("best" if trial.workers == best else "", trial.note) if word)
        rows.append(TableRow(cells=(f"{trial.workers}", *figures, note)))
    return Table(names=("workers tried", "per batch", "first batch", ""), rows=tuple(rows), figures=(1, 2))


def finding_points(findings: Sequence[FitFinding]) -> Points:
    """Return findings, the gravest first, with title, evidence and the line to change."""
    return Points(tuple(_finding(finding) for finding in gravest_first(findings)))


def _finding(finding: FitFinding) -> Point:
    costs = {} if not finding.time else {format_time(finding.time): " per batch"}
    costs |= {} if not finding.nbytes else {format_bytes(finding.nbytes): ""}
    unsaid = [figure + unit for figure, unit in costs.items() if figure not in finding.what + " " + finding.evidence]
    what = finding.what + f" ({', '.join(unsaid)})" if unsaid else finding.what
    lines = [finding.evidence] if finding.evidence else []
    lines += ("→ " + finding.change).splitlines() if finding.change else []
    return Point(word=finding.severity, what=what, lines=tuple(lines), warns=finding.severity == "problem")


def remedy_points(remedies: Sequence[Remedy]) -> Points:
    """Return the remedies with their effects; measured ones come first."""
    ordered = sorted(remedies, key=lambda remedy: not remedy.measured)
    words = ("measured" if remedy.measured else "untried" for remedy in ordered)
    return Points(
        tuple(
            Point(word=word, what=f"{remedy.name}: " + remedy.effect, lines=("→ " + remedy.change,) if remedy.change else ())
            for word, remedy in zip(words, ordered, strict=True)
        )
    )


def settings_table(settings: Sequence[Setting]) -> Table:
    """Return the switches of the environment, behind a fold."""
    rows = tuple(TableRow(cells=(setting.name, setting.value, setting.note)) for setting in settings)
    brief = " · ".join(f"{setting.name} {setting.value}" for setting in settings)
    return Table(
        names=("setting", "is", ""),
        rows=rows,
        fold="settings of speed and repeatability",
        brief=FactLines((("settings", brief),)),
    )


def rank_blocks(ranks: RankReport) -> Iterator[Block]:
    """Yield a row per rank, of very many the ones that differ most, and the findings."""
    shown = _telling(ranks.rows)
    columns = [_times([getattr(row, name) for row in shown]) for name in ("step", "wait", "backward")]
    columns.append(_known([None if row.peak is None else format_bytes(row.peak) for row in shown]))
    rows = [
        TableRow(cells=(f"{row.rank}", f"{row.host}, pid {row.pid}", row.device, f"{row.batches:,}", *figures, row.state))
        for row, *figures in zip(shown, *columns, strict=True)
    ]
    if len(ranks.rows) > len(shown):
        rows.append(TableRow(cells=(f"{len(ranks.rows) - len(shown)} more", *[""] * 8)))
    yield Table(names=_RANK_NAMES, rows=tuple(rows), figures=(3, 4, 5, 6, 7))
    silent = ranks.world - len(ranks.rows)
    words = [f"of {counted(ranks.world, 'rank')} {silent} said nothing"] if silent > 0 else []
    words += [ranks.note] if ranks.note else []
    if words:
        yield FactLines((("ranks", joined(" · ", words)),))
    if ranks.findings:
        yield finding_points(ranks.findings)


def _telling(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return rows that fit on a page, in their order: first those that ended otherwise than most, then the slowest."""
    ends = Counter(row.state for row in rows)
    by_interest = sorted(rows, key=lambda row: (ends[row.state], -(row.step or 0)))
    return sorted(by_interest[:_RANKS_SHOWN], key=lambda row: row.rank)


def _times(values: Sequence[int | None]) -> list[str]:
    """Return times as a column, each by itself."""
    largest = max((value for value in values if value is not None), default=0)
    return _known([None if value is None else format_time(value, largest) for value in values])


def _known(figures: Sequence[str | None]) -> list[str]:
    """Return a column of figures whose unknown ones say so, or an empty one if none is known."""
    is_known = any(figure is not None for figure in figures)
    return [figure or ("not known" if is_known else "") for figure in figures]


def comparison_blocks(comparison: Comparison) -> Iterator[Block]:
    """Yield this run against the one before: a sentence, the figures, and whether a difference means anything."""
    yield FactLines((("compared", comparison.sentence),))
    if comparison.changes:
        rows = tuple(TableRow(cells=(change.name, *_change(change))) for change in comparison.changes)
        yield Table(names=("against the run before", "before", "now", "change", ""), rows=rows, figures=(1, 2, 3))
    if comparison.notes:
        yield Listing(sentences=comparison.notes)


def _change(change: RunChange) -> tuple[str, str, str, str]:
    match change.unit:
        case "ns":
            before, now = format_time(change.before), format_time(change.now)
        case "bytes":
            before, now = format_bytes(change.before), format_bytes(change.now)
        case "batches":
            before, now = f"{change.before:,}", f"{change.now:,}"
    ratio = _ratio(change.now / change.before) if change.before else ""
    unknown = "too few batches to tell" if change.unit == "ns" else "one reading each"
    words = {True: "a real difference", False: "within the noise", None: unknown}[change.is_significant]
    if change.low is not None and change.high is not None:
        words += f" (95 %: {_ratio(change.low)} to {_ratio(change.high)})"
    return before, now, ratio, words


def _ratio(ratio: float) -> str:
    """Return a ratio of now to before as a change in percent."""
    percent = round(1000 * (ratio - 1))
    return f"{'+' if percent > 0 else '−' if percent < 0 else '±'}{abs(percent) / 10:.1f} %"


def overhead_sentence(overhead: Overhead) -> str:
    """Return the cost of the profile itself in words."""
    parts = {"before": overhead.before, "during": overhead.during, "after": overhead.after}
    when = ", ".join(f"{format_time(took)} {name} it" for name, took in parts.items() if took)
    share = f"{100 * overhead.share:.3g} % of the fit's own" + (f": {when}" if when else "")
    return f"itself took {format_time(overhead.total)} of processor time, {share}"


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
