"""The loader's verdict, findings, remedies, ranks, operators and the comparison of a profile, in words and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from nbguard.render.blocks import Block, FactLines, Listing, Point, Points, Table, TableRow
from nbguard.texts import joined
from nbguard.training.profiler.analysis.loader.fetches import FileReading, LoaderPart
from nbguard.training.profiler.analysis.operators import OperatorTable
from nbguard.training.profiler.analysis.report import (
    Comparison,
    FitFinding,
    LoaderVerdict,
    Overhead,
    RankReport,
    RankRow,
    Remedy,
    RunChange,
    Setting,
    WorkerTrial,
    gravest_first,
)
from nbguard.units import counted, format_bytes, format_time

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
    marks = f"{overhead.marks:,} marks of {format_time(overhead.per_mark)}"
    looked = f" and {format_time(overhead.watching)} of sampling" if overhead.watching else ""
    return f"itself took {100 * overhead.share:.3g} % of the wall time, by its own measurement ({marks}{looked})"
