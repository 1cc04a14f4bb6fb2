"""The few sentences with which the report begins: the first things to do."""

from __future__ import annotations

from collections.abc import Iterable

from nbguard.profiler.analysis.report import SEVERITIES, FitFinding, LoaderVerdict, Timing
from nbguard.units import format_time

_MOST = 3
_WAITS = ("data", "transfer", "Python")
_WORTH = 0.02
"""Of a batch: advice that would save less is not among the first things to do."""


def first_steps(timing: Timing, loader: LoaderVerdict | None, findings: Iterable[FitFinding]) -> tuple[str, ...]:
    """Return what to do first, problems before what would save the most time; one sentence where nothing stands out."""
    ordered = sorted(findings, key=_urgency)
    sentences = [
        _sentence(finding, timing.step or 0)
        for finding in ordered
        if finding.severity == "problem" or _is_worth_it(finding, timing)
    ]
    if not sentences and not timing.batches:
        sentences.append("nothing was trained here: no backward pass and no optimizer step were seen on this thread")
    elif not sentences and loader is not None:
        sentences.append(loader.sentence if loader.bound in _WAITS else f"nothing stands out: {loader.sentence}")
    return tuple(sentences[:_MOST])


def _urgency(finding: FitFinding) -> tuple[int, int]:
    return SEVERITIES.index(finding.severity), -(finding.time or 0)


def _is_worth_it(finding: FitFinding, timing: Timing) -> bool:
    return finding.severity == "advice" and (finding.time or 0) >= _WORTH * (timing.step or 0)


def _sentence(finding: FitFinding, step: int) -> str:
    gain = ""
    if finding.severity == "advice" and finding.time:  # more than a batch: a cost per epoch, spread over its batches
        gain = f" (up to {format_time(finding.time)} {'of each' if finding.time <= step else 'per'} batch)"
    return f"{finding.what}: {finding.change}{gain}"
