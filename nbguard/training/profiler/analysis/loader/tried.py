"""Settings of a loader that the same fit ran with before, as advice that was followed and did not help is not given again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.units import format_time

_SHORTER = 0.9  # of an epoch's time: a change that leaves more has not helped
_LONGER = 1.1  # times an epoch's time: a change that makes it take more does harm
_ADVISED = re.compile(r"`(num_workers|persistent_workers|prefetch_factor)=(\d+|True)\b")
"""The setting in a line that is advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun:
    """One run of a fit: how its loader was set up, the time of an epoch, and the advice on the loader."""

    fit: str  # that identify runs of the same fit: its models, data set, batch size and number of batches
    num_workers: int
    persistent_workers: bool
    prefetch_factor: int | None  # None if unknown, or no workers
    epoch: int  # nanoseconds of the shortest training epoch
    epochs: int = 1  # training epochs
    advised: tuple[str, ...] = ()  # lines to change


def without_tried(advice: Sequence[FitFinding], now: LoaderRun, before: Sequence[LoaderRun]) -> Iterator[FitFinding]:
    """Yield advice on the loader of this run, less advice whose settings took the same fit as long `before`.

    One line says what was tried: it comes first where this run followed the advice of an earlier one in vain.
    """
    in_vain = next((found for run in reversed(before) if (found := _in_vain(now, run)) is not None), None)
    if in_vain is not None:
        yield in_vain
    for finding in advice:
        setting = _setting(finding.change)
        if setting is None or finding.severity == "note":
            yield finding
        elif in_vain is None:
            tried = [run for run in before if _value(run, setting[0]) == setting[1]]
            best = min(tried, key=lambda run: run.epoch, default=None)
            yield finding if best is None or best.epoch < _SHORTER * now.epoch else _tried(finding, setting, best, now)


def _in_vain(now: LoaderRun, run: LoaderRun) -> FitFinding | None:
    """Return that this run has followed the advice of an earlier one, and takes as long or longer."""
    followed = [setting for setting in map(_setting, run.advised) if setting and _value(now, setting[0]) == setting[1]]
    changed = next(((name, value) for name, value in followed if _value(run, name) != value), None)
    if changed is None or now.epoch < _SHORTER * run.epoch:
        return None
    name, value = changed
    lost = (now.epoch - run.epoch) * now.epochs
    return FitFinding(
        kind="workers",
        severity="advice" if now.epoch > _LONGER * run.epoch else "note",
        what=f"`{name}={value}` has made no epoch shorter",
        evidence=f"one takes {format_time(now.epoch)} with it, and took {format_time(run.epoch)} before",
        change=f"`{name}={_value(run, name)}`, as it was",
        total=max(0, lost),
    )


def _tried(finding: FitFinding, setting: tuple[str, int | bool], best: LoaderRun, now: LoaderRun) -> FitFinding:
    name, value = setting
    return replace(
        finding,
        severity="note",
        what=f"`{name}={value}` has been tried, and made no epoch shorter",
        evidence=f"one took {format_time(best.epoch)} with it, and takes {format_time(now.epoch)} as it is now",
        change="",
        time=None,
        total=None,
    )


def _setting(change: str) -> tuple[str, int | bool] | None:
    """Return the setting of a loader that a line changes, and its value."""
    found = _ADVISED.search(change)
    if found is None:
        return None
    return found[1], found[2] == "True" or int(found[2])


def _value(run: LoaderRun, name: str) -> int | bool | None:
    value: int | bool | None = getattr(run, name)
    return value
