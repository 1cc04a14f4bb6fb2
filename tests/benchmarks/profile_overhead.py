"""What profiling costs a fit: nbguard beside no profiler, fastxtend's simple profiler and torch.profiler, in one run.

    python tests/benchmarks/profile_overhead.py [--rounds 15] [--batches 160]

A fastai fit of a new Learner on random data, once with a step of about 1 ms and once of about 10 ms (on an idle core). In each
round every way profiles the same fit, in an order that rotates, and is divided by the round's fit without a profiler; medians
of these ratios with their quartiles: of a batch of the steady state, and of the whole fit with all that is done once. Processor
time, so that others on the machine disturb little. fastxtend is looked for in build/peers (`make bench` puts it there); a way
that cannot be measured says why. Prints; it never fails by time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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
    """Seconds of processor time that a fit took: as a whole, and per batch of the steady state."""

    whole: float
    batch: float


Data = list[tuple[torch.Tensor, torch.Tensor]]


def learner(data: Data, width: int) -> Any:
    """Return a Learner that nothing has looked at: CPython 3.11 and 3.12 read the attributes of one that was asked slower."""
    torch.manual_seed(1)
    dls = DataLoaders.from_dsets(data, data[:BATCH], bs=BATCH, num_workers=0, device="cpu")
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


WAYS: dict[str, Way] = {
    "no profiler": lambda learn: nullcontext(),
    "nbguard": with_nbguard,
    "fastxtend": fastxtend,
    "torch.profiler": torch_profiler,
}


def took(learn: Any, way: Way) -> Took:
    """Return what the fit itself took: what is made of it afterwards costs the fit nothing."""
    gc.collect()
    learn.loss_func.at.clear()
    with contextlib.redirect_stdout(io.StringIO()), way(learn), learn.no_logging():
        start = time.process_time()
        learn.fit(1, 1e-4)
        whole = time.process_time() - start
    at = learn.loss_func.at[WARM_UP:-1]  # the last is of the validation
    steps = sorted(after - before for before, after in itertools.pairwise(at))
    return Took(whole, statistics.mean(steps[: round(0.98 * len(steps))]))  # without what others have disturbed most


def measured(data: Data, width: int, rounds: int) -> dict[str, list[Took] | str]:
    found: dict[str, list[Took] | str] = {}
    for name, way in WAYS.items():  # once unmeasured: what it imports, and whether it runs at all
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
            times.append(took(learner(data, width), WAYS[name]))
    return found


def spread(ratios: list[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"× {middle:.3f} ({low:.3f} … {high:.3f})"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--batches", type=int, default=160)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {chosen.rounds} rounds of {chosen.batches} batches, one thread, processor time")
    data = [(torch.randn(64), torch.tensor(at % 2)) for at in range(BATCH * chosen.batches)]
    for width in (64, 1300):
        found = measured(data, width, chosen.rounds)
        plain = found["no profiler"]
        assert isinstance(plain, list)
        step = statistics.median(each.batch for each in plain)
        print(f"\nstep without a profiler: {step * 1000:.2f} ms")
        for name, times in found.items():
            if isinstance(times, str):
                print(f"  {name:16} not measured: {times}")
            elif name != "no profiler":
                batch = [each.batch / base.batch for each, base in zip(times, plain, strict=True)]
                whole = [each.whole / base.whole for each, base in zip(times, plain, strict=True)]
                extra = statistics.median(each.batch - base.batch for each, base in zip(times, plain, strict=True)) * 1e6
                print(f"  {name:16} {spread(batch)}  {extra:+7.0f} µs a batch; the whole fit {spread(whole)}")
        with nbguard.profile_fit(show=False) as profile:
            took(learner(data, width), WAYS["no profiler"])
        own = profile.report.overhead
        each = own.total / chosen.batches / 1000
        print(f"  nbguard's own measurement of itself: {own.share:.2%} of the wall time, {each:.0f} µs a batch")


if __name__ == "__main__":
    main()
