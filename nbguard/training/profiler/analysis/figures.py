"""The figures of a report that a log of experiments takes, one number each, in seconds, bytes, shares or counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nbguard.training.profiler.analysis.report import EpochRow, FitReport, MemoryPoint, MemoryReport, TimeRow

Unit = Literal["seconds", "bytes", "ratio", ""]

_NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number for a log of experiments."""

    name: str  # e.g. "step_median"
    value: float  # in `unit`
    unit: Unit = ""  # "": a count
    of: str = ""  # the phase, or kind of epoch; "": of the whole fit
    epoch: int | None = None  # number of the pass over a loader; None for all

    @property
    def key(self) -> str:
        """Return its name in a log, e.g. 'nbguard/phase_median_seconds/wait for data'."""
        return "/".join(part for part in ("nbguard", self.full_name, self.of) if part)

    @property
    def full_name(self) -> str:
        """Return the name with its unit, e.g. 'phase_median_seconds'."""
        return f"{self.name}_{self.unit}" if self.unit else self.name


def figures(report: FitReport) -> tuple[Figure, ...]:
    """Return all figures that are known; an unknown one is left out, never 0."""
    return (*_whole(report), *_phases(report), *_memory(report), *_epochs(report), *_ranks(report))


def _whole(report: FitReport) -> Iterator[Figure]:
    timing = report.timing
    times = {"wall": timing.wall, "first_batch": timing.first, "step_median": timing.step, "step_p95": timing.step_p95}
    for name, value in times.items():
        if value is not None:
            yield Figure(name=name, value=value / _NS, unit="seconds")
    yield Figure(name="batches", value=timing.batches)
    yield Figure(name="epochs", value=sum(epoch.is_training for epoch in timing.epochs))
    yield Figure(name="fits", value=timing.fits)
    if timing.busy is not None:
        yield Figure(name="gpu_busy", value=timing.busy, unit="ratio")
    if report.loader is not None and report.loader.gain is not None:
        yield Figure(name="loader_gain", value=report.loader.gain / _NS, unit="seconds")
    if report.loader is not None:
        rates = {
            "items_per_second": report.loader.items_per_second,
            "loader_items_per_second": report.loader.possible_items_per_second,
        }
        for name, rate in rates.items():
            if rate is not None:
                yield Figure(name=name, value=rate)
        if report.loader.reading is not None:
            yield Figure(name="loader_read_per_second", value=report.loader.reading.per_second, unit="bytes")
            yield Figure(name="loader_read_from_storage", value=report.loader.reading.from_storage, unit="ratio")
    if report.scaled_steps:
        yield Figure(name="scaled_steps", value=report.scaled_steps)
        yield Figure(name="skipped_steps", value=report.skipped_steps)
    yield Figure(name="overhead", value=report.overhead.share, unit="ratio")
    yield Figure(name="findings", value=len(report.findings))
    yield Figure(name="problems", value=sum(finding.severity == "problem" for finding in report.findings))
    yield Figure(name="is_partial", value=int(report.is_partial))


def _phases(report: FitReport) -> Iterator[Figure]:
    for row in report.timing.rows:
        phase = _name(row)
        yield Figure(name="phase_total", value=row.total / _NS, unit="seconds", of=phase)
        if report.timing.wall:
            yield Figure(name="phase_share", value=row.total / report.timing.wall, unit="ratio", of=phase)
        for name, value in (("phase_median", row.median), ("phase_p95", row.p95), ("phase_gpu_median", row.gpu)):
            if value is not None:
                yield Figure(name=name, value=value / _NS, unit="seconds", of=phase)


def _name(row: TimeRow) -> str:
    """Return the name of a phase: there may be one of a name in training batches, and one in the others."""
    return row.phase if row.group == "batch" else f"{row.group} {row.phase}"


def _memory(report: FitReport) -> Iterator[Figure]:
    memory = report.memory
    if not isinstance(memory, MemoryReport):
        return
    yield Figure(name="memory_peak", value=memory.peak, unit="bytes")
    for name, value in (("memory_reserved_peak", memory.peak_reserved), ("memory_capacity", memory.capacity)):
        if value is not None:
            yield Figure(name=name, value=value, unit="bytes")
    for phase in memory.phases:
        yield Figure(name="phase_memory_peak", value=phase.peak, unit="bytes", of=phase.phase)
    if memory.growth is not None:
        yield Figure(name="memory_growth_per_batch", value=memory.growth.per_batch, unit="bytes")


def _epochs(report: FitReport) -> Iterator[Figure]:
    memory = epoch_memory(report)
    for epoch in report.timing.epochs:
        kind = _kind(epoch)
        yield Figure(name="epoch_total", value=epoch.total / _NS, unit="seconds", of=kind, epoch=epoch.number)
        yield Figure(name="epoch_wait_for_data", value=epoch.wait / _NS, unit="seconds", of=kind, epoch=epoch.number)
        yield Figure(name="epoch_batches", value=epoch.batches, unit="", of=kind, epoch=epoch.number)
        points = memory.get((kind, epoch.number), ())
        if points:
            last = points[-1]
            yield Figure(
                name="epoch_memory_peak",
                value=max(point.allocated for point in points),
                unit="bytes",
                of=kind,
                epoch=epoch.number,
            )
            yield Figure(name="epoch_memory_end", value=last.allocated, unit="bytes", of=kind, epoch=epoch.number)
            if last.reserved is not None:
                unused = last.reserved - last.allocated
                yield Figure(name="epoch_memory_reserved", value=last.reserved, unit="bytes", of=kind, epoch=epoch.number)
                yield Figure(name="epoch_memory_unused", value=unused, unit="bytes", of=kind, epoch=epoch.number)


def _ranks(report: FitReport) -> Iterator[Figure]:
    """Yield the figures of each rank. Ranks wait for each other in the backward pass, which is shortest on the slowest one."""
    rows = () if report.ranks is None else report.ranks.rows
    backward = [row.backward for row in rows if row.backward is not None]
    for row in rows:
        times = {"step_median": row.step, "wait_for_data": row.wait, "backward_median": row.backward}
        if row.backward is not None and len(backward) > 1:
            times["wait_for_ranks"] = row.backward - min(backward)
        for name, value in times.items():
            if value is not None:
                yield Figure(name=f"rank_{name}", value=value / _NS, unit="seconds", of=f"rank {row.rank}")
        if row.peak is not None:
            yield Figure(name="rank_memory_peak", value=row.peak, unit="bytes", of=f"rank {row.rank}")


def epoch_memory(report: FitReport) -> dict[tuple[str, int], tuple[MemoryPoint, ...]]:
    """Return the readings of memory in each epoch, by its kind and number; an epoch lasts until the next one begins.

    Readings are thinned: the highest of them is the highest level that was seen, and the epoch's peak at most that of the fit.
    """
    memory = report.memory
    known = [epoch for epoch in report.timing.epochs if epoch.start is not None]
    if not isinstance(memory, MemoryReport) or not known:
        return {}
    ordered = sorted(known, key=lambda epoch: epoch.start or 0)
    starts = [epoch.start or 0 for epoch in ordered]
    points: dict[tuple[str, int], list[MemoryPoint]] = {}
    for point in memory.points:
        place = bisect_right(starts, point.at) - 1
        if place >= 0:
            points.setdefault((_kind(ordered[place]), ordered[place].number), []).append(point)
    return {key: tuple(values) for key, values in points.items()}


def _kind(epoch: EpochRow) -> str:
    return "training" if epoch.is_training else "validation"


def summary(report: FitReport) -> str:
    """Return the sentences of the report as Markdown: the first steps, the findings and the notes."""
    lines = [f"**{report.title}**: {report.ending}", ""]
    lines += [f"{number}. {sentence!s}" for number, sentence in enumerate(report.first, 1)]
    for finding in report.findings:
        sentence = finding.what + f" ({finding.evidence}). " + finding.change
        lines.append(f"- {finding.severity}: {str(sentence).rstrip()}")
    return "\n".join([*lines, *(f"- {note}" for note in report.notes)])
