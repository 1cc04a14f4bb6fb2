"""The time of a fit, in words and figures, by phases, steps, epochs. The figures shown add up to the wall time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from nbguard.render.blocks import Block, FactLines, Table, TableRow
from nbguard.training.profiler.analysis.report import EpochRow, Group, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import counted, format_time, re_adding, re_adding_times

COLOURS = {
    phase_log.WAIT: "strand",
    phase_log.TO_DEVICE: "h1",
    phase_log.TRANSFORMS: "h3",
    phase_log.FORWARD: "h0",
    phase_log.LOSS: "rel",
    phase_log.BACKWARD: "h2",
    phase_log.STEP: "h4",
    phase_log.ZERO_GRAD: "h5",
}
"""The colour of a phase wherever it is drawn; all others share one."""
REST = "other"

_GROUPS: dict[Group, str] = {"batch": "training batches", "validation": "validation", "around": "around the batches"}
_BATCH: tuple[Group] = ("batch",)
_NAMES = ("where the time went", "total", "share", "batch median", "batch p95", "on the GPU")
_PHASES_SHOWN = 16
_EPOCHS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _Line:
    """A phase as shown: its total and its share are rounded so that they add up, in nanoseconds and in tenths of a percent."""

    row: TimeRow
    total: int
    tenths: int
    per_batch: tuple[str, str, str]


def time_blocks(timing: Timing) -> Iterator[Block]:
    """Yield the table of phases, small ones added up per group; then steps, epochs and the GPU."""
    yield replace(_phases(timing.rows, 0.001), brief=_phases(timing.rows, 0.01))
    yield FactLines(tuple(_facts(timing)))


def brief_time_blocks(timing: Timing) -> Iterator[Block]:
    """Yield a short table: phases of 5 % and more of a batch, the other groups as one row each; then steps and epochs."""
    yield _phases(timing.rows, 0.05, parts_of=_BATCH)
    yield FactLines(tuple(fact for fact in _facts(timing) if fact[0] != "GPU" or timing.busy is not None))


def epoch_blocks(epochs: Sequence[EpochRow]) -> Iterator[Block]:
    """Yield the passes over the data, behind a fold, where there are several."""
    rows = [*_passes(epochs, is_training=True), *_passes(epochs, is_training=False)]
    if len(rows) > 1:
        yield Table(
            names=("pass over the data", "batches", "total", "waits for data"),
            rows=tuple(rows),
            figures=(1, 2, 3),
            fold="epoch by epoch",
            brief=FactLines(()),
        )


def _phases(time_rows: Sequence[TimeRow], smallest: float, parts_of: Collection[Group] = tuple(_GROUPS)) -> Table:
    wall = sum(row.total for row in time_rows)
    rows: list[TableRow] = []
    lines = _lines(time_rows, wall)
    for group, name in _GROUPS.items():
        if mine := [line for line in lines if line.row.group == group and line.row.total]:
            rows += _group(name, mine, wall, smallest) if group in parts_of else [_row(name, mine, wall, "group")]
    return Table(names=_NAMES, rows=(*rows, _row("", lines, wall, "sum")), figures=range(1, len(_NAMES)))


def _lines(rows: Sequence[TimeRow], wall: int) -> list[_Line]:
    """Return phases as shown: of a step in the order of their run, then the others, largest first."""
    order = {phase: place for place, phase in enumerate(phase_log.STEP_PHASES)}
    rows = sorted(rows, key=lambda row: (order.get(row.phase, len(order)), -row.total))
    totals = [row.total for row in rows]
    tenths = re_adding(totals, 1000, wall) if wall else totals
    return list(map(_Line, rows, re_adding_times(totals), tenths, _per_batch(rows)))


def _per_batch(rows: Sequence[TimeRow]) -> list[tuple[str, str, str]]:
    """Return the time of each phase per batch, each column in one unit."""
    columns = []
    for name in ("median", "p95", "gpu"):
        values = [getattr(row, name) for row in rows]
        known = [value for value in values if value is not None]
        unknown = "not known" if known and name != "gpu" else ""
        shown = ["" if value is None else format_time(value, max(known)) for value in values]
        columns.append([text or (unknown if row.group == "batch" else "") for text, row in zip(shown, rows, strict=True)])
    return list(zip(*columns, strict=True))


def _group(name: str, lines: list[_Line], wall: int, smallest: float) -> Iterator[TableRow]:
    if len(lines) == 1:
        yield _row(f"{name}: {lines[0].row.phase}", lines, wall, "group")
        return
    yield _row(name, lines, wall, "group")
    largest = sorted(lines, key=lambda line: -line.row.total)[:_PHASES_SHOWN]
    few = [line for line in lines if line.row.total < smallest * wall or line not in largest]
    if few == lines:
        return
    merged = few if len(few) > 1 else []
    for line in lines:
        if line not in merged:
            yield _row(line.row.phase, [line], wall, "part")
    if merged:
        all_small = all(line.row.total < smallest * wall for line in merged)
        yield _row(f"{len(merged)} {f'below {100 * smallest:g} % each' if all_small else 'smaller'}", merged, wall, "part")


def _row(name: str, lines: Sequence[_Line], wall: int, kind: Literal["group", "part", "sum"]) -> TableRow:
    is_one = kind != "sum" and len(lines) == 1
    total, tenths = sum(line.total for line in lines), sum(line.tenths for line in lines)
    cells = (name, format_time(total, wall), _percent(tenths), *(lines[0].per_batch if is_one else ("", "", "")))
    colour = COLOURS.get(lines[0].row.phase, REST) if is_one else REST
    return TableRow(cells=cells, kind=kind, share=tenths / 1000 if kind == "part" or is_one else None, colour=colour)


def _percent(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10} %"


def _facts(timing: Timing) -> Iterator[tuple[str, str]]:
    yield "step", " · ".join(_step(timing))
    if timing.epochs:
        fits = f"in {timing.fits} fits: " if timing.fits > 1 else ""
        yield "epochs", fits + " · ".join(_epochs(timing.epochs))
    if timing.busy is None and timing.busy_note:
        yield "GPU", f"utilization not known: {timing.busy_note}"
    elif timing.busy is not None:
        note = f" ({timing.busy_note})" if timing.busy_note else ""
        yield "GPU", f"busy for {100 * timing.busy:.1f} % of the steady state{note}"


def _step(timing: Timing) -> Iterator[str]:
    if timing.step is None:
        yield "not known, because there were too few batches"
    else:
        p95 = "" if timing.step_p95 is None else f", p95 {format_time(timing.step_p95)}"
        yield f"{format_time(timing.step)} (median{p95})"
    if timing.first is not None:
        yield f"the first {format_time(timing.first)}"
    if timing.warm_up:
        yield f"{counted(timing.warm_up, 'batch', 'batches')} of warm-up left out"


def _epochs(epochs: Sequence[EpochRow]) -> Iterator[str]:
    """Yield how many passes over the data there were, how long they took, and how much of it was waiting."""
    for word, is_training in (("", True), ("validation ", False)):
        passes = [epoch for epoch in epochs if epoch.is_training == is_training]
        totals = sorted(epoch.total for epoch in passes)
        if passes:
            least, middle, most = map(format_time, (totals[0], round(median(totals)), totals[-1]))
            spread = f" ({least} to {most})" if least != most else ""
            batches = counted(sum(epoch.batches for epoch in passes), "batch", "batches")
            wait = 100 * sum(epoch.wait for epoch in passes) / (sum(totals) or 1)
            yield f"{word}{len(passes)} × {middle}{spread}, {batches}, {wait:.1f} % waiting for data"


def _passes(epochs: Sequence[EpochRow], *, is_training: bool) -> Iterator[TableRow]:
    """Yield a row per pass; of many, each row stands for a few in succession."""
    passes = [epoch for epoch in epochs if epoch.is_training == is_training]
    per_row = -(-len(passes) // _EPOCHS_SHOWN) or 1
    largest = max((sum(epoch.total for epoch in passes[at : at + per_row]) for at in range(0, len(passes), per_row)), default=0)
    for at in range(0, len(passes), per_row):
        group = passes[at : at + per_row]
        total, wait = sum(epoch.total for epoch in group), sum(epoch.wait for epoch in group)
        numbers = str(group[0].number) if len(group) == 1 else f"{group[0].number} to {group[-1].number}"
        yield TableRow(
            cells=(
                f"{'epoch' if is_training else 'validation'} {numbers}",
                f"{sum(epoch.batches for epoch in group):,}",
                format_time(total, largest),
                f"{100 * wait / (total or 1):.1f} %",
            )
        )
