"""What profiling costs a fit: nbguard beside no profiler, fastxtend's simple profiler and torch.profiler, in one run.

    python tests/benchmarks/profile_overhead.py [--rounds 15] [--batches 160]

A fastai fit of a new Learner on random data, once with a step of about 1 ms and once of about 10 ms (on an idle core). In each
round every way profiles the same fit, in an order that rotates, and is divided by the round's fit without a profiler; medians
of these ratios with their quartiles: of a batch of the steady state, and of the whole fit with all that is done once. Processor
time, so that others on the machine disturb little. Where they do, the quickest of all rounds says more: of each batch by its
number the least time, and the mean of these over the batches (without what a profiler does now and then in any batch).

fastxtend is looked for in build/peers (`make bench` puts it there). It comes last, with a fit of its own to be divided by: to
import it changes fastai's loop. A way that cannot be measured says why. Prints; it never fails by time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, nn

import nbguard

BATCH = 32
WARM_UP = 40
"""Batches that are not the steady state: nbguard looks closely at the first ones."""
VALIDATION = 3
"""Batches of the validation: fastxtend leaves the first one out and cannot do with none."""
WIDTHS = (64, 900)
"""Of the model's layers: a step of about 1 ms and one of about 10 ms."""
Way = Callable[[Any], AbstractContextManager[Any]]


class Stamped(CrossEntropyLossFlat):
    """A loss that notes the thread's processor time at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def __call__(self, *args: Any, **kw: Any) -> Any:
        self.at.append(time.thread_time())
        return super().__call__(*args, **kw)


@dataclass(frozen=True)
class Took:
    """Seconds of processor time that a fit took: as a whole, and each batch of the steady state."""

    whole: float
    batches: list[float]

    @property
    def batch(self) -> float:
        """Return the mean batch, without the few that others have disturbed most."""
        steps = sorted(self.batches)
        return statistics.mean(steps[: round(0.98 * len(steps))])


def quickest(times: list[Took]) -> float:
    """Return the mean over the batches of the least time that each has taken in any fit."""
    return statistics.mean(map(min, zip(*(each.batches for each in times), strict=True)))


Data = list[tuple[torch.Tensor, torch.Tensor]]


def learner(data: Data, width: int) -> Any:
    """Return a Learner that nothing has looked at: CPython 3.11 and 3.12 read the attributes of one that was asked slower."""
    torch.manual_seed(1)
    dls = DataLoaders.from_dsets(data, data[: VALIDATION * BATCH], bs=BATCH, num_workers=0, device="cpu")
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    found = Learner(dls, net, loss_func=Stamped())
    found.remove_cbs([each for each in found.cbs if each.name == "progress"])
    return found


@contextmanager
def fastxtend(learn: Any) -> Iterator[None]:
    from fastxtend.callback.profiler import SimpleProfilerCallback, SimpleProfilerPostCallback

    callbacks = [SimpleProfilerCallback(show_report=False), SimpleProfilerPostCallback()]
    learn.add_cbs(callbacks)
    try:
        yield
    finally:
        learn.remove_cbs(callbacks)


def torch_profiler(learn: Any) -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def with_nbguard(learn: Any) -> AbstractContextManager[Any]:
    return nbguard.profile_fit(show=False)


BASE = "no profiler"
WAYS: dict[str, Way] = {BASE: lambda learn: nullcontext(), "nbguard": with_nbguard, "torch.profiler": torch_profiler}
WAYS_ON_FASTXTEND: dict[str, Way] = {BASE: WAYS[BASE], "fastxtend": fastxtend}


def took(learn: Any, way: Way) -> Took:
    """Return what the fit itself took: what is made of it afterwards costs the fit nothing."""
    gc.collect()
    learn.loss_func.at.clear()
    with contextlib.redirect_stdout(io.StringIO()), way(learn), learn.no_logging():
        start = time.process_time()
        learn.fit(1, 1e-4)
        whole = time.process_time() - start
    at = learn.loss_func.at[WARM_UP:-VALIDATION]
    return Took(whole, [after - before for before, after in itertools.pairwise(at)])


def measured(ways: dict[str, Way], data: Data, width: int, rounds: int) -> dict[str, list[Took] | str]:
    found: dict[str, list[Took] | str] = {}
    for name, way in ways.items():  # once unmeasured: what it imports, and whether it runs at all
        try:
            took(learner(data, width), way)
            found[name] = []
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[-1].strip()[:120]
    names = [name for name, times in found.items() if isinstance(times, list)]
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            times = found[name]
            assert isinstance(times, list)
            times.append(took(learner(data, width), ways[name]))
    return found


def spread(ratios: list[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"× {middle:.3f} ({low:.3f} … {high:.3f})"


def say(found: dict[str, list[Took] | str]) -> None:
    """Print what the ways took, divided by the fit without a profiler."""
    plain = found[BASE]
    assert isinstance(plain, list)
    step = statistics.median(each.batch for each in plain)
    print(f"\nstep without a profiler: {step * 1000:.2f} ms")
    for name, times in found.items():
        if isinstance(times, str):
            print(f"  {name:16} not measured: {times}")
        elif name != BASE:
            batch = [each.batch / base.batch for each, base in zip(times, plain, strict=True)]
            whole = [each.whole / base.whole for each, base in zip(times, plain, strict=True)]
            extra = statistics.median(each.batch - base.batch for each, base in zip(times, plain, strict=True)) * 1e6
            least, base = quickest(times), quickest(plain)
            print(f"  {name:16} {spread(batch)}  {extra:+7.0f} µs a batch; the whole fit {spread(whole)}")
            print(f"  {'':16} of the quickest × {least / base:.3f}  {(least - base) * 1e6:+7.0f} µs on {base * 1000:.2f} ms")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--batches", type=int, default=160)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {chosen.rounds} rounds of {chosen.batches} batches, one thread, processor time")
    data = [(torch.randn(64), torch.tensor(at % 2)) for at in range(BATCH * chosen.batches)]
    for width in WIDTHS:
        say(measured(WAYS, data, width, chosen.rounds))
        with nbguard.profile_fit(show=False) as profile:
            took(learner(data, width), WAYS[BASE])
        own = profile.report.overhead
        each = own.total / chosen.batches / 1000
        print(f"  nbguard's own measurement of itself: {own.share:.2%} of the wall time, {each:.0f} µs a batch")
    try:
        importlib.import_module("fastxtend.callback.profiler")  # before any Learner is made: it adds to the default callbacks
    except Exception as error:
        print(f"\nfastxtend: not measured: {type(error).__name__}: {error}"[:160])
        return
    print("\nThe same with fastxtend imported, whose event for each batch the fit without a profiler has, too:")
    for width in WIDTHS:
        say(measured(WAYS_ON_FASTXTEND, data, width, chosen.rounds))


if __name__ == "__main__":
    main()
