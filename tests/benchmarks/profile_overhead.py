"""What profiling costs a fit: nbguard beside no profiler, torch.profiler, pyinstrument and fastxtend's, in one run.

    python tests/benchmarks/profile_overhead.py [--rounds 40] [--batches 800]
    python tests/benchmarks/profile_overhead.py --instructions
    python tests/benchmarks/profile_overhead.py --cuda

Epochs of plain loops, with a loader and without, and fastai fits of a new Learner, on random data, with a step of about 1 ms
and one of about 10 ms (on an idle core). In each round every way profiles the same epoch, in an order that rotates, and is
compared with the round's epoch without a profiler: medians with their quartiles, of a batch of the steady state, of the whole
epoch, and of what is done once before and after it. Processor time, so that others on the machine disturb little. Where they
do, the quickest of all rounds says more: of each batch by its number the least time, and the mean of these over the batches
(without what a profiler does now and then in any batch). What nbguard's reports say of its own cost stands beside what this
clock says.

`--instructions` counts what nbguard adds to a batch that is not looked at, which no other work on the machine changes: in
valgrind's callgrind (apt-get install valgrind; some minutes), with the accesses to memory that a cache of 1 MiB misses.

`--cuda` runs the fits with the step of about 1 ms on the GPU, without a profiler and with nbguard.

fastxtend and pyinstrument are looked for in build/peers (`make bench` puts them there). fastxtend comes last, with a fit of its
own to be compared with: to import it changes fastai's loop. A way that cannot be measured says why. It never fails by time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, nn

import nbguard
import nbguard.training.profiler.profile
from nbguard.training.profiler.analysis.time.phase_log import PhaseLog
from nbguard.training.profiler.profile import FitProfile
from nbguard.training.profiler.record import log
from nbguard.training.profiler.record.recorder import Recorder
from tests.benchmarks import callgrind

BATCH = 32
WARM_UP = 512
"""Batches before the steady state: until then nbguard looks at all of the first 32, then at each 13th, then at each 37th; later
only at each 101st."""
VALIDATION = 3
"""Batches of the validation: fastxtend leaves the first one out and cannot do with none."""
WIDTHS = (64, 900)
"""Of the model's layers: a step of about 1 ms and one of about 10 ms."""
Way = Callable[[Any], AbstractContextManager[Any]]


LOGGED = [0.0, 0.0]
"""Processor time at which the last log of nbguard's began and ended."""


class StampedRecorder(Recorder):
    """A recorder that notes when its log begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        LOGGED[0] = time.process_time()

    def stop(self) -> PhaseLog:
        LOGGED[1] = time.process_time()
        return super().stop()


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
    around: float  # before and after the epoch
    own: float | None = None  # by the profiler's own account, which begins and ends with its log
    logged: float | None = None  # from the beginning of that log to its end

    @property
    def batch(self) -> float:
        """Return the mean batch, without the few that others have disturbed most."""
        steps = sorted(self.batches)
        return statistics.mean(steps[: round(0.98 * len(steps))])


def quickest(times: list[Took]) -> float:
    """Return the mean over the batches of the least time that each has taken in any fit."""
    return statistics.mean(map(min, zip(*(each.batches for each in times), strict=True)))


Data = list[tuple[torch.Tensor, torch.Tensor]]
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Loop:
    """A plain loop over torch's loader, with the interface of `LearnerFit`."""

    def __init__(self, data: Data, width: int) -> None:
        torch.manual_seed(1)
        self.net, self.measure = net(width), nn.CrossEntropyLoss()
        self.at: list[float] = []
        self.loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-4)
        self.learner = None

    def batches(self) -> Batches:
        return self.loader

    def epoch(self) -> None:
        for x, y in self.batches():
            prediction = self.net(x)
            self.at.append(time.thread_time())
            self.measure(prediction, y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class LoopOnGpu(Loop):
    """The same on the GPU."""

    def __init__(self, data: Data, width: int) -> None:
        super().__init__(data, width)
        self.net.cuda()

    def batches(self) -> Batches:
        return ((x.cuda(non_blocking=True), y.cuda(non_blocking=True)) for x, y in self.loader)


class BareLoop(Loop):
    """A loop that asks no loader: it takes its batches from tensors in memory."""

    def __init__(self, data: Data, width: int) -> None:
        super().__init__(data, width)
        xs, ys = zip(*data, strict=True)
        self.x, self.y = torch.stack(xs), torch.stack(ys)

    def batches(self) -> Batches:
        return zip(self.x.split(BATCH), self.y.split(BATCH), strict=True)


class BareLoopOnGpu(BareLoop):
    """The same on the GPU."""

    def __init__(self, data: Data, width: int) -> None:
        super().__init__(data, width)
        self.net.cuda()
        self.x, self.y = self.x.cuda(), self.y.cuda()


class LearnerFit:
    """A fit of a new Learner."""

    def __init__(self, data: Data, width: int) -> None:
        self.learner = learner(data, width)
        self.at = self.learner.loss_func.at

    def epoch(self) -> None:
        with self.learner.no_logging():
            self.learner.fit(1, 1e-4)


class LearnerFitOnGpu(LearnerFit):
    """The same on the GPU."""

    def __init__(self, data: Data, width: int) -> None:
        super().__init__(data, width)
        self.learner.dls.to(torch.device("cuda"))


Fit = Loop | LearnerFit
FITS: dict[str, type[Loop] | type[LearnerFit]] = {
    "a plain loop": Loop,
    "a loop without a loader": BareLoop,
    "a fastai fit": LearnerFit,
}
FITS_ON_GPU: dict[str, type[Loop] | type[LearnerFit]] = {
    "a plain loop": LoopOnGpu,
    "a loop without a loader": BareLoopOnGpu,
    "a fastai fit": LearnerFitOnGpu,
}


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def learner(data: Data, width: int) -> Any:
    """Return a Learner that nothing has looked at: CPython 3.11 and 3.12 read the attributes of one that was asked slower."""
    torch.manual_seed(1)
    dls = DataLoaders.from_dsets(data, data[: VALIDATION * BATCH], bs=BATCH, num_workers=0, device="cpu")
    found = Learner(dls, net(width), loss_func=Stamped())
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


def pyinstrument(learn: Any) -> AbstractContextManager[Any]:
    profiler: AbstractContextManager[Any] = importlib.import_module("pyinstrument").Profiler()
    return profiler


def with_nbguard(learn: Any) -> AbstractContextManager[Any]:
    return nbguard.profile_fit(show=False)


BASE = "no profiler"
WAYS: dict[str, Way] = {
    BASE: lambda learn: nullcontext(),
    "nbguard": with_nbguard,
    "torch.profiler": torch_profiler,
    "pyinstrument": pyinstrument,
}
WAYS_ON_FASTXTEND: dict[str, Way] = {BASE: WAYS[BASE], "fastxtend": fastxtend}


def took(fit: Fit, way: Way) -> Took:
    """Return what an epoch took, and what is done once around it; nothing is shown."""
    gc.collect()
    fit.at.clear()
    clock = time.process_time
    with contextlib.redirect_stdout(io.StringIO()):
        begun = clock()
        with way(fit.learner) as profiler:
            start = clock()
            fit.epoch()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            end = clock()
        ended = clock()
    at = fit.at[WARM_UP : -VALIDATION if fit.learner else None]
    batches = [after - before for before, after in itertools.pairwise(at)]
    own = profiler.report.overhead.during / 1e9 if isinstance(profiler, FitProfile) else None
    logged = None if own is None else LOGGED[1] - LOGGED[0]
    return Took(end - start, batches, (start - begun) + (ended - end), own, logged)


def measured(ways: dict[str, Way], make: Callable[[], Fit], rounds: int) -> dict[str, list[Took] | str]:
    found: dict[str, list[Took] | str] = {}
    for name, way in ways.items():  # once unmeasured: what it imports, and whether it runs at all
        try:
            took(make(), way)
            found[name] = []
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[-1].strip()[:120]
    names = [name for name, times in found.items() if isinstance(times, list)]
    for turn in range(rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            times = found[name]
            assert isinstance(times, list)
            times.append(took(make(), ways[name]))
    return found


def spread(ratios: list[float]) -> str:
    """Return the median with the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"× {middle:.3f} ({low:.3f} … {high:.3f})"


def say(found: dict[str, list[Took] | str]) -> None:
    """Print what the ways took beside the epoch without a profiler."""
    plain = found[BASE]
    assert isinstance(plain, list)
    step = statistics.median(each.batch for each in plain)
    print(f"  step without a profiler: {step * 1000:.2f} ms")
    for name, times in found.items():
        if isinstance(times, str):
            print(f"    {name:15} not measured: {times}")
        elif name != BASE:
            pairs = list(zip(times, plain, strict=True))
            batch = [each.batch / base.batch for each, base in pairs]
            whole = [each.whole / base.whole for each, base in pairs]
            extra = statistics.median(each.batch - base.batch for each, base in pairs) * 1e6
            around = statistics.median(each.around - base.around for each, base in pairs) * 1e3
            least, base = quickest(times), quickest(plain)
            print(f"    {name:15} {spread(batch)}  {extra:+7.0f} µs a batch; the epoch {spread(whole)}")
            print(f"    {'':15} before and after the epoch {around:+.0f} ms")
            print(f"    {'':15} of the quickest × {least / base:.3f}  {(least - base) * 1e6:+7.0f} µs on {base * 1000:.2f} ms")
            own = [each.own for each in times if each.own is not None]
            if own:
                outside = statistics.median((each.logged or 0) - before.whole for each, before in pairs)
                says = statistics.median(own)
                ratio = f"{max(says, outside) / min(says, outside):.2f} × apart (goal 1.2)" if min(says, outside) > 0 else ""
                print(
                    f"    {'':15} by its report {says * 1e3:.1f} ms of its log, by this clock {outside * 1e3:.1f} ms  {ratio}"
                )


FIRST, COUNTED = 60, 20
"""Batches before those whose instructions are counted, and these; none of them is looked at."""


def count(name: str, way: str) -> None:
    """Run a fit in callgrind, and have it write what `COUNTED` batches take."""
    vars(log).update(_ALL=8, _OFTEN=1001)
    data = [(torch.randn(64), torch.tensor(at % 2)) for at in range(BATCH * (FIRST + COUNTED + 4))]
    orders = {FIRST - 3: "--instr=on", FIRST: "--dump=before", FIRST + COUNTED: "--dump=counted"}

    class Ordering(list[float]):
        def append(self, at: float) -> None:
            if len(self) in orders:
                callgrind.order(orders[len(self)])
            super().append(at)

    fit = FITS[name](data, WIDTHS[0])
    fit.at = Ordering()
    if isinstance(fit, LearnerFit):
        fit.learner.loss_func.at = fit.at
    gc.disable()
    with WAYS[way](fit.learner):
        fit.epoch()


def say_instructions() -> None:
    """Print what nbguard adds to a batch that it does not look at."""
    for name in FITS:
        found = {}
        for way in (BASE, "nbguard"):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-W", "ignore", __file__, "--count", name, way]
                dumps = dict(callgrind.counted(command, folder, "--cache-sim=yes", "--LL=1048576,16,64"))
            executed, *_, missed_code, missed_reads, missed_writes = dumps["counted"]
            found[way] = executed / COUNTED, (missed_code + missed_reads + missed_writes) / COUNTED
        (base, base_missed), (ours, ours_missed) = found.values()
        print(f"{name}: {base:,.0f} instructions a batch without, nbguard {ours - base:+,.0f} ({ours / base - 1:+.1%})")
        print(
            f"    accesses that a cache of 1 MiB misses: {base_missed:,.0f}, nbguard {ours_missed - base_missed:+,.0f}",
            flush=True,
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--batches", type=int, default=800)
    options.add_argument("--instructions", action="store_true")
    options.add_argument("--cuda", action="store_true")
    options.add_argument("--count", nargs=2, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.instructions:
        say_instructions()
        return
    if chosen.batches < WARM_UP + 100:
        options.error(f"the steady state begins after {WARM_UP} batches: --batches {WARM_UP + 100} or more")
    torch.set_num_threads(1)
    if chosen.count:
        count(*chosen.count)
        return
    nbguard.training.profiler.profile.Recorder = StampedRecorder  # type: ignore[misc]
    print(f"torch {torch.__version__}, {chosen.rounds} rounds of {chosen.batches} batches, one thread, processor time")
    data = [(torch.randn(64), torch.tensor(at % 2)) for at in range(BATCH * chosen.batches)]
    if chosen.cuda:
        for name, kind in FITS_ON_GPU.items():
            print(f"\n{name} on {torch.cuda.get_device_name()}:")
            say(measured({way: WAYS[way] for way in (BASE, "nbguard")}, partial(kind, data, WIDTHS[0]), chosen.rounds))
        return
    for name, kind in FITS.items():
        for width in WIDTHS:
            print(f"\n{name}:")
            say(measured(WAYS, partial(kind, data, width), chosen.rounds))
    try:
        importlib.import_module("fastxtend.callback.profiler")  # before any Learner is made: it adds to the default callbacks
    except Exception as error:
        print(f"\nfastxtend: not measured: {type(error).__name__}: {error}"[:160])
        return
    print("\nThe same with fastxtend imported, whose event for each batch the fit without a profiler has, too:")
    for width in WIDTHS:
        say(measured(WAYS_ON_FASTXTEND, partial(LearnerFit, data, width), chosen.rounds))


if __name__ == "__main__":
    main()
