"""Uneven shares of ranks in time, memory and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from nbguard.training.profiler.analysis.report import FitFinding, RankRow
from nbguard.units import MiB, format_bytes, format_time

_NOTICED = 0.10
"""A rank stands out by more than this share of the others' figure."""


def skews(rows: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield the stragglers, the ranks with more memory than others, and different numbers of batches."""
    for row in rows:
        others = [other for other in rows if other is not row]
        yield from _straggler(row, others)
        yield from _memory(row, others)
    yield from _batches([row for row in rows if row.state == "complete"])


def _straggler(row: RankRow, others: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield a finding on a rank that is slower than the others.

    Whole steps are equally long where ranks wait for each other, which they do in the backward pass: it is shorter on the
    rank that is waited for. So the rest of the step decides, if the others do wait or the whole step is longer, too.
    """
    timed = [other for other in others if other.step is not None]
    if row.step is None or not timed:
        return
    own, usual = _own(row), median(_own(other) for other in timed)
    excess = round(own - usual)
    step = median(other.step or 0 for other in timed)
    waiting = median(other.backward or 0 for other in timed) - (row.backward or 0)
    if excess <= _NOTICED * step or (waiting <= excess / 2 and row.step <= (1 + _NOTICED) * step):
        return
    evidence = f"{format_time(own)} per batch outside the backward pass, the other ranks {format_time(usual)}"
    data = (row.wait or 0) - median(other.wait or 0 for other in timed)
    if data > excess / 2:
        evidence += f"; {format_time(data)} of the difference is waiting for data"
    if waiting > excess / 2:
        evidence += f". The others wait for it, so their backward pass takes {format_time(waiting)} longer than its own"
    change = "make its data as fast as theirs (check transforms, disk, `num_workers` and cores)"
    if data <= excess / 2:
        place = f"{row.device} of {row.host}" if row.device else row.host
        change = f"look for other programs on {place}, and for work that only this rank does"
    yield FitFinding(
        kind="straggler",
        severity="advice",
        what=f"Rank {row.rank} is the straggler",
        evidence=evidence,
        change=change,
        time=excess,
    )


def _own(row: RankRow) -> int:
    return (row.step or 0) - (row.backward or 0)


def _memory(row: RankRow, others: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield a finding on a rank whose peak is higher than the others'."""
    peaks = [other.peak for other in others if other.peak]
    if not row.peak or not peaks:
        return
    usual = round(median(peaks))
    more = row.peak - usual
    if more > max(MiB, _NOTICED * usual):
        evidence = f"peak {format_bytes(row.peak)}, the other ranks {format_bytes(usual)}: {format_bytes(more)} more"
        change = (
            "look for data that only this rank holds, such as other ranks' tensors loaded to its device "
            "(`map_location`), logs or metrics"
        )
        yield FitFinding(
            kind="rank memory",
            severity="advice",
            what=f"Rank {row.rank} takes more memory",
            evidence=evidence,
            change=change,
            nbytes=more,
        )


def _batches(rows: Sequence[RankRow]) -> Iterator[FitFinding]:
    """Yield a finding on ranks that have run different numbers of batches."""
    if len({row.batches for row in rows}) > 1:
        evidence = ", ".join(f"rank {row.rank}: {row.batches}" for row in rows)
        change = "give every rank the same number: `DistributedSampler`, or `drop_last=True`"
        what = "The ranks ran different numbers of batches, so one of them waits forever for the others"
        yield FitFinding(kind="rank", severity="problem", what=what, evidence=evidence, change=change)
