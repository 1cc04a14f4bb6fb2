"""The number of workers that a loader needs, with candidates, the end of the trials, and their result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbguard.training.profiler.analysis.report import WorkerTrial
from nbguard.units import counted, format_time

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
