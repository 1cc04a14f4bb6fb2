"""The verdict on a fit, bound by its data, by the copy to the device, by Python or by computing, from its steady state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbguard.training.profiler.analysis.loader_advice import WAITING, LoaderContext, advice
from nbguard.training.profiler.analysis.report import Bound, FitFinding, LoaderVerdict, Timing, WorkerTrial
from nbguard.training.profiler.analysis.slowest import (
    LoaderFacts,
    StoragePace,
    items_per_second,
    loader_parts,
    reading,
    storage_wait,
    training_loader,
)
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.units import counted, format_time

# --- The number of workers that a loader needs, by trials, and settings that the same fit ran with before.


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
    storage: StoragePace | None = None  # of the files that the trials opened; None if unknown or there were none


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


_BUSY = 0.90  # of the time: a GPU that works so much has nothing to wait for
_STARVED = 0.70  # of the time: a GPU that works less, though nothing is waited for, waits for Python
_KEEPS_UP = 0.05  # of the time: a GPU that is behind no longer does all work as it comes, and the gain is unknown
_PYTHON = 0.50  # of a step in callbacks and other code, on a CPU: the largest part
_MOST = 0.25  # of a step in one phase: less is not said to be where the time goes
_NO_LOADER = "no DataLoader was seen, so the time to make a batch counts as other code"
_OF_MODEL = (phase_log.FORWARD, phase_log.LOSS, phase_log.BACKWARD)


def verdict(
    timing: Timing,
    loaders: Sequence[LoaderFacts],
    cores: int,
    on_accelerator: bool,
    of_library: float = 0.0,
    copied: int = 0,
    *,
    is_compiled: bool = False,
    faster_step: str = "",
) -> LoaderVerdict:
    """Return the verdict on the steady state of a fit, and the advice on its loaders.

    Args:
        timing: the parts of the time; `busy` is the GPU's share, where it is known.
        loaders: as they were used.
        cores: CPU cores that this process may use.
        on_accelerator: whether the model is on one.
        of_library: share of the other code in training batches that is a library's own loop.
        copied: nanoseconds per batch for moving other things than the batch to the device.
        is_compiled: whether a model is compiled already.
        faster_step: a way to make the optimizer's step take fewer calls, if there is one.
    """
    if not timing.step:
        return LoaderVerdict(bound="unknown", sentence="not known, because no training batch ran after the warm-up")
    medians = dict(timing.medians)
    medians[phase_log.TO_DEVICE] = max(0, medians.get(phase_log.TO_DEVICE, 0) - copied)
    bound, gain, sentence = _bound(
        timing, timing.step, medians, on_accelerator, of_library, _more_work(medians, is_compiled, faster_step)
    )
    loader = training_loader(loaders)
    if bound == "data" and loader is not None and storage_wait(loader.fetch) is not None:
        sentence = sentence.replace("data-bound", "IO-bound", 1)
    context = LoaderContext(
        timing=timing,
        step=timing.step,
        medians=medians,
        loaders=tuple(loaders),
        cores=cores,
        on_accelerator=on_accelerator,
        is_waiting=bound == "data" or (bound == "compute" and gain is not None),
    )
    size = None if loader is None else loader.batch_size
    return LoaderVerdict(
        bound=bound,
        sentence=sentence,
        gain=gain,
        advice=tuple(advice(context)),
        items_per_second=None if size is None else size / timing.step * 1e9,
        possible_items_per_second=None if loader is None else items_per_second(loader),
        reading=None if loader is None else reading(loader, timing.step),
        parts=() if loader is None else loader_parts(loader, medians),
    )


def _bound(
    timing: Timing, step: int, medians: dict[str, int], on_accelerator: bool, of_library: float, more_work: str
) -> tuple[Bound, int | None, str]:
    wait, transfer = medians.get(phase_log.WAIT, 0), medians.get(phase_log.TO_DEVICE, 0)
    waited = f"{_share(wait, step)} is waiting for data" if phase_log.WAIT in medians else _NO_LOADER
    busy = timing.busy if on_accelerator else None
    idle = step if busy is None else timing.gainable
    is_idle = busy is None or busy < _BUSY
    gpu = "" if busy is None else f", and the GPU had work waiting {busy:.0%} of the time"
    largest = max((time for phase, time in medians.items() if phase != phase_log.WAIT), default=0)
    waits = is_idle and wait > WAITING * step and wait >= transfer
    if waits and (wait >= largest or busy is not None):
        words = f"data-bound: {_share(wait, step)} is waiting for data{gpu}"
        return "data", min(wait, idle), f"{words}; {_at_most(min(wait, idle), step)}"
    if is_idle and on_accelerator and transfer > WAITING * step:
        words = f"transfer-bound: {_share(transfer, step)} brings the batch to the device{gpu}"
        return "transfer", min(transfer, idle), f"{words}; {_at_most(min(transfer, idle), step)}"
    own_code = (row for row in timing.rows if row.group == "batch" and (row.callback or row.phase == phase_log.OTHER))
    python = sum(row.median or 0 for row in own_code)
    if busy is not None and busy < _STARVED:
        words = _python_bound(busy, step, medians, more_work)
        return "Python", idle, words if busy <= _KEEPS_UP else f"{words}; {_at_most(idle, step)}"
    theirs = round(of_library * medians.get(phase_log.OTHER, 0))
    if not on_accelerator and python - theirs > _PYTHON * step:
        words = f"Python-bound: {_share(python, step)} is in callbacks and other code"
        return "Python", python, f"{words}; {_at_most(python, step)}"
    if waits:
        return "compute", wait, f"compute-bound, though {_share(wait, step)} is waiting for data; {_at_most(wait, step)}"
    if on_accelerator and busy is None:
        why = timing.busy_note or "the GPU's own time was not measured"
        return (
            "unknown",
            None,
            f"{waited}; whether the GPU waits for Python is not known: {why}",
        )
    words = f"compute-bound: {waited}{gpu}"
    loop = " (most of it the library's own loop)" if 2 * theirs > python else ""
    parts = (python, f"callbacks and other code{loop}"), (medians.get(phase_log.TRANSFORMS, 0), "batch transforms")
    code = "".join(f"{_share(part, step)} is in {name}, " for part, name in parts if part > WAITING * step)
    return "compute", None, f"{words}; {code}the rest goes to the model, the loss and the optimizer"


def _python_bound(busy: float, step: int, medians: dict[str, int], more_work: str) -> str:
    """Return that a GPU waits for the program, its place in the program, and possible remedies."""
    words = f"Python-bound: for {1 - busy:.0%} of the time the GPU had no work waiting"
    phase = _largest(medians)
    if medians.get(phase, 0) < _MOST * step:
        return words
    return f"{words}; the program spends {_share(medians[phase], step)} in {phase}{more_work and f': {more_work}'}"


def _largest(medians: dict[str, int]) -> str:
    """Return the phase that takes the program most of a batch, waiting for data apart."""
    own = {phase: time for phase, time in medians.items() if phase != phase_log.WAIT}
    return max(own, key=lambda name: own[name], default="")


def _more_work(medians: dict[str, int], is_compiled: bool, faster_step: str) -> str:
    """Return a way to make a GPU wait less, by the phase that takes the program most of a batch; "" for other phases."""
    phase = _largest(medians)
    if phase in _OF_MODEL:
        change = "larger batches" if is_compiled else "larger batches or `torch.compile(model)`"
        return f"{change} give it more work at a time"
    if phase == phase_log.OTHER:
        return "check the loop's own code between the model calls"
    return faster_step if phase == phase_log.STEP else ""


def _share(part: int, step: int) -> str:
    return f"{format_time(part)} of each batch's {format_time(step)} ({part / step:.0%})"


def _at_most(gain: int, step: int) -> str:
    return f"at most {format_time(gain)} per batch ({gain / step:.0%}) to gain"
