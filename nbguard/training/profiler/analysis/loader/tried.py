"""The number of workers that a loader needs, by trials, and settings that the same fit ran with before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbguard.training.profiler.analysis.report import FitFinding, WorkerTrial
from nbguard.units import counted, format_time

# --- The number of workers that a loader needs, with candidates, the end of the trials, and their result.


_ROOM = 0.9  # of the rest of a step: a loader that takes no longer is waited for by nobody
_LITTLE = 0.1  # of the rest of a step: a batch that is made between two steps, without workers, and that takes no longer
_BETTER = 0.9  # of the best so far: a trial that takes longer is no improvement


@dataclass(frozen=True, slots=True)
class WorkerTuning:
    """The trials of other numbers of workers, made after the fit."""

    trials: tuple[WorkerTrial, ...] = ()  # in the order of making
    best: int | None = None  # the number of workers that they speak for; None if none was made
    sentence: str = ""  # the result in words, or the reason why there is none


def candidates(current: int, cores: int) -> tuple[int, ...]:
    """Return the numbers of workers to try, in this order: none, as it is, then 1, 2, 4 … up to the cores."""
    powers = [2**i for i in range(cores.bit_length()) if 2**i < cores]
    return tuple(dict.fromkeys((0, current, *powers, cores)))


def is_enough(trials: Sequence[WorkerTrial], current: int, step: int) -> bool:
    """Say whether more trials tell nothing: the last was fast enough, or the last two were no faster than those before."""
    climb = [trial.per_batch for trial in trials if trial.workers == 0 or trial.workers != current]
    if not climb or trials[-1].workers == current != 0:
        return False
    if climb[-1] <= (_ROOM if trials[-1].workers else _LITTLE) * step:
        return True
    return len(climb) > 2 and min(climb[-2:]) > _BETTER * min(climb[:-2])


def choose(trials: Sequence[WorkerTrial], current: int, step: int) -> tuple[int | None, str]:
    """Return the number of workers that the trials speak for, and why, in a sentence.

    Args:
        trials: the measurements.
        current: the number of workers in the fit.
        step: nanoseconds of a batch without waiting for data: the loader has to keep up with it.
    """
    if not trials:
        return None, "nothing was measured"
    wholes = {trial: trial.per_batch + step if trial.workers == 0 else max(trial.per_batch, step) for trial in trials}
    best = min((trial for trial in trials if wholes[trial] <= min(wholes.values()) / _BETTER), key=lambda trial: trial.workers)
    now = next((trial for trial in trials if trial.workers == current), None)
    words = f"{workers_words(best.workers)}: a batch every {format_time(best.per_batch)}"
    if now is not None and now is not best:
        words += f" instead of {format_time(now.per_batch)} with {current}"
    elif now is best:
        words += ", as it is now"
    rest = f"the rest of a step takes {format_time(step)}"
    if best.workers == 0:  # it is made between the steps, and always waited for
        return 0, f"{words}; {rest}, so the fit waits {best.per_batch / max(wholes[best], 1):.0%} of the time"
    if best.per_batch <= _ROOM * step:
        return best.workers, f"{words}; {rest}, so nothing waits for data"
    if best.per_batch <= step:
        return best.workers, f"{words}; {rest}, hardly longer"
    return (
        best.workers,
        f"{words}; {rest}, so the fit still waits, and the cost is in making a batch, not in the number of workers",
    )


def workers_words(count: int) -> str:
    """Return a number of workers in words."""
    return "no worker" if count == 0 else counted(count, "worker")


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
