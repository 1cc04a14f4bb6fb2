"""The figures of a report that a log of experiments takes: one number each, in seconds, bytes, shares or counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nbguard.profiler.analysis.report import EpochRow, FitReport, MemoryReport, TimeRow

Unit = Literal["seconds", "bytes", "ratio", ""]

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Figure:
    """One number: what it is, of which phase ("": of the whole fit), in which pass over a loader (None: in all)."""

    name: str
    value: float
    unit: Unit = ""
    of: str = ""
    epoch: int | None = None

    @property
    def key(self) -> str:
        """Return the name under which a log keeps it, e.g. 'nbguard/phase_median_seconds/wait for data'."""
        return "/".join(part for part in ("nbguard", self.full_name, self.of) if part)

    @property
    def full_name(self) -> str:
        """Return the name with its unit, e.g. 'phase_median_seconds'."""
        return f"{self.name}_{self.unit}" if self.unit else self.name


def figures(report: FitReport) -> tuple[Figure, ...]:
    """Return all figures that are known; what is not known is left out, never 0."""
    return (*_whole(report), *_phases(report), *_memory(report), *_epochs(report))


def _whole(report: FitReport) -> Iterator[Figure]:
    timing = report.timing
    times = {"wall": timing.wall, "first_batch": timing.first, "step_median": timing.step, "step_p95": timing.step_p95}
    for name, value in times.items():
        if value is not None:
            yield Figure(name, value / _NS, "seconds")
    yield Figure("batches", timing.batches)
    yield Figure("epochs", sum(epoch.is_training for epoch in timing.epochs))
    yield Figure("fits", timing.fits)
    if timing.busy is not None:
        yield Figure("gpu_busy", timing.busy, "ratio")
    if report.loader is not None and report.loader.gain is not None:
        yield Figure("loader_gain", report.loader.gain / _NS, "seconds")
    yield Figure("overhead", report.overhead.share, "ratio")
    yield Figure("findings", len(report.findings))
    yield Figure("problems", sum(finding.severity == "problem" for finding in report.findings))
    yield Figure("is_partial", int(report.is_partial))


def _phases(report: FitReport) -> Iterator[Figure]:
    for row in report.timing.rows:
        phase = _name(row)
        yield Figure("phase_total", row.total / _NS, "seconds", phase)
        if report.timing.wall:
            yield Figure("phase_share", row.total / report.timing.wall, "ratio", phase)
        for name, value in (("phase_median", row.median), ("phase_p95", row.p95), ("phase_gpu_median", row.gpu)):
            if value is not None:
                yield Figure(name, value / _NS, "seconds", phase)


def _name(row: TimeRow) -> str:
    """Return the name of a phase: there may be one of a name in training batches, and one in the others."""
    return row.phase if row.group == "batch" else f"{row.group} {row.phase}"


def _memory(report: FitReport) -> Iterator[Figure]:
    memory = report.memory
    if not isinstance(memory, MemoryReport):
        return
    yield Figure("memory_peak", memory.peak, "bytes")
    for name, value in (("memory_reserved_peak", memory.peak_reserved), ("memory_capacity", memory.capacity)):
        if value is not None:
            yield Figure(name, value, "bytes")
    for phase in memory.phases:
        yield Figure("phase_memory_peak", phase.peak, "bytes", phase.phase)
    if memory.growth is not None:
        yield Figure("memory_growth_per_batch", memory.growth.per_batch, "bytes")


def _epochs(report: FitReport) -> Iterator[Figure]:
    for epoch in report.timing.epochs:
        kind = _kind(epoch)
        yield Figure("epoch_total", epoch.total / _NS, "seconds", kind, epoch.number)
        yield Figure("epoch_wait_for_data", epoch.wait / _NS, "seconds", kind, epoch.number)
        yield Figure("epoch_batches", epoch.batches, "", kind, epoch.number)


def _kind(epoch: EpochRow) -> str:
    return "training" if epoch.is_training else "validation"


def summary(report: FitReport) -> str:
    """Return what the report says in words, as Markdown: what to do first, and the findings."""
    lines = [f"**{report.title}**: {report.ending}", ""]
    lines += [f"{number}. {sentence}" for number, sentence in enumerate(report.first, 1)]
    for finding in report.findings:
        lines.append(f"- {finding.severity}: {finding.what} ({finding.evidence}). {finding.change}")
    return "\n".join([*lines, *(f"- {note}" for note in report.notes)])
