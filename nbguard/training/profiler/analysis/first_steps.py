"""The few sentences at the beginning of the report, on the first things to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nbguard.training.profiler.analysis.report import FitFinding, Group, LoaderVerdict, Timing
from nbguard.units import MiB, format_time

_MOST = 3
_WAITS = ("data", "transfer", "Python")
_WORTH = 0.02
"""Of a batch, or of the fit: advice that would save less is not among the first things to do."""
_LARGE = 0.10
"""Share of the fit: a finding that would save so much comes before a verdict that only says that the GPU waits for Python."""
_NAMED = 0.05
"""Least share of the wall time of a part that is named where nothing stands out."""
_HALF = 0.5
"""Share of the fit: a shorter wait for data without a known cause is the time that batches take to be made."""
_NOTICED = 50_000_000
"""Nanoseconds of the fit: waiting that takes less is not mentioned, however short the fit."""
_GROWS = ("graph", "growth")
"""Kinds of findings on memory that grows."""
_COPIES = ("worker memory",)
"""Kinds of findings on memory that is there several times: from `_MUCH_MEMORY` on it counts as growth does."""
_STAYS = ("retain_graph", "temporaries")
"""Kinds of findings on memory that stays for a while in each batch."""
_MUCH_MEMORY = 64 * MiB
"""Growth in the fit, of memory, that comes before any loss of time;"""
_SOME_MEMORY = 8 * MiB
"""growth, and memory that stays in each batch, that is mentioned;"""
_AS_TIME = 0.25
"""and share of the fit's time that less growth counts as."""
_COSTS_LATER = ("cache",)
"""Kinds of findings whose time is the least part of their cost, in other phases: they count as such growth does."""
_UNCOUNTED = ("no_grad", "frozen")
"""Kinds of findings whose cost has no figure: they are said after those that have one."""
_CODE = ("code", "callback", "library")
"""Kinds of findings that name code: where they explain half of the fit's wait, the verdict says nothing more."""
_GROUPS: dict[Group, str] = {"batch": "", "validation": "validation", "around": "around the batches"}


@dataclass(frozen=True, slots=True)
class _Step:
    """One thing to do, with the figures that decide on its place."""

    sentence: str
    lost: int  # nanoseconds of the whole fit that it may save
    rank: tuple[int, int] | None = None  # of a problem's finding: the fit is wrong, not only slow


def first_steps(timing: Timing, loader: LoaderVerdict | None, findings: Iterable[FitFinding]) -> tuple[str, ...]:
    """Return the first things to do: problems, then by the time that they would save of the whole fit.

    One sentence where nothing stands out, with the largest parts of the time.
    """
    if not timing.batches:
        unused = (finding.what + ": " + finding.change for finding in findings if finding.kind == "no_grad")
        return ("nothing was trained here; this thread ran no backward pass and no optimizer step", *unused)
    known = list(findings)
    steps = [_step(finding, timing) for finding in known if finding.severity == "problem" or _is_worth_it(finding, timing)]
    if loader is not None and loader.bound in _WAITS and not any(finding in loader.advice for finding in known):
        lost = timing.of_fit(loader.gain or 0)
        is_named = 2 * sum(_lost(finding, timing) for finding in known if finding.kind in _CODE) >= lost > 0
        is_usual = loader.bound == "data" and lost < _HALF * timing.of_fit(timing.step or 0) and not loader.advice
        if not is_named and not is_usual and lost >= _NOTICED:
            if loader.bound == "Python" and timing.busy is not None:  # of no use where something in that time has a name
                lost = min([lost, *(step.lost - 1 for step in steps if step.lost >= _LARGE * timing.wall)])
            steps.append(_Step(loader.sentence, lost))
    steps.sort(key=lambda step: (step.rank is None, step.rank or (), -step.lost))
    if steps or loader is None:
        return tuple(step.sentence for step in steps[:_MOST])
    return (f"nothing stands out: {loader.sentence}{_largest_parts(timing)}",)


def _lost(finding: FitFinding, timing: Timing) -> int:
    """Return the nanoseconds of the whole fit that a finding costs."""
    return finding.total if finding.total is not None else timing.of_fit(finding.time or 0)


def _is_worth_it(finding: FitFinding, timing: Timing) -> bool:
    if finding.kind in _COPIES:
        is_large = (finding.nbytes or 0) >= _MUCH_MEMORY
    elif finding.kind in _STAYS:
        is_large = (finding.nbytes or 0) >= _SOME_MEMORY
    elif finding.kind in _GROWS:
        is_large = (finding.nbytes or 0) * timing.batches >= _SOME_MEMORY or (finding.total or 0) >= _WORTH * timing.wall
    elif finding.total is not None:
        is_large = finding.total >= _WORTH * timing.wall
    else:
        is_large = finding.kind in _UNCOUNTED or (finding.time or 0) >= _WORTH * (timing.step or 0)
    return finding.severity == "advice" and is_large


def _step(finding: FitFinding, timing: Timing) -> _Step:
    lost, gain = _lost(finding, timing), ""
    if finding.severity == "advice" and finding.time:
        per = "of each" if finding.time <= (timing.step or 0) else "per"  # more than a batch of this rank: of a slower one
        most = "at least" if finding.kind in _COSTS_LATER else "up to"
        gain = f" ({most} {format_time(finding.time)} {per} batch, {format_time(lost)} of the fit)"
    elif finding.severity == "advice" and lost:
        gain = f" ({lost / (timing.wall or 1):.0%} of the fit)"
    if finding.kind in (*_COSTS_LATER, *_COPIES):
        lost = max(lost, round(_AS_TIME * timing.wall))
    is_problem = finding.severity == "problem"
    if finding.kind in _GROWS:
        is_problem &= (finding.nbytes or 0) * timing.batches >= _MUCH_MEMORY
        lost = max(lost, round(_AS_TIME * timing.wall))
    return _Step(finding.what + ": " + finding.change + gain, lost, finding.rank if is_problem else None)


def _largest_parts(timing: Timing) -> str:
    """Return the largest parts of the wall time in words, validation and the code around the batches as one part each."""
    parts: dict[str, int] = {}
    usual: dict[str, int] = {}
    for row in timing.rows:
        name = _GROUPS[row.group] or row.phase
        parts[name] = parts.get(name, 0) + row.total
        if row.group == "batch" and row.median:
            usual[name] = row.median
    largest = sorted(parts.items(), key=lambda part: -part[1])[:_MOST]
    words = [
        f"{total / timing.wall:.0%} {name}{_in_few_batches(total, usual.get(name), timing)}"
        for name, total in largest
        if total >= _NAMED * (timing.wall or 1)
    ]
    return f". Of the fit's {format_time(timing.wall)}: {', '.join(words)}" if words else ""


def _in_few_batches(total: int, median: int | None, timing: Timing) -> str:
    """Return a word on a part that takes its time in few batches: the first of all, as a rule."""
    if median is None or not timing.is_in_few(total, median):
        return ""
    return f" ({format_time(median)} in most batches, the rest in a few)"
