"""Advice on loaders that was followed and did not help: it is remembered in the session, said once and not given again."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbguard.memory.scan.devices.host import usable_cores
from nbguard.training.profiler.analysis.fit_report import FitAnalysis
from nbguard.training.profiler.analysis.loader_verdict import LoaderRun, without_tried
from nbguard.training.profiler.analysis.observations import FitObservations
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.profile import FitProfile

S = 10**9


def run(workers: int, seconds: float, *advised: str, persistent: bool = False) -> LoaderRun:
    return LoaderRun(
        fit="Net · Rows · 16 · 50",
        num_workers=workers,
        persistent_workers=persistent,
        prefetch_factor=2 if workers else None,
        epoch=round(seconds * S),
        epochs=3,
        advised=advised,
    )


def advice(change: str) -> FitFinding:
    return FitFinding(kind="workers", severity="advice", what="batches are slow", evidence="", change=change, time=10**6)


TWO = "`num_workers=2`; `--tune-workers` measures which number is best"
NONE = "`num_workers=0` makes batches in the fit's own process"
PERSISTENT = "`persistent_workers=True` starts them once"


@pytest.mark.parametrize(
    ("change", "now", "before", "severity"),
    [
        (TWO, run(0, 5), (), "advice"),
        (TWO, run(0, 5), (run(2, 5.2),), "note"),  # took as long
        (TWO, run(0, 5), (run(2, 3),), "advice"),  # was shorter
        (TWO, run(0, 5), (run(4, 9),), "advice"),  # another number
        (TWO, run(0, 5), (run(2, 9), run(2, 3)), "advice"),  # the best of several
        (PERSISTENT, run(2, 5), (run(2, 5, persistent=True),), "note"),
        (PERSISTENT, run(2, 5), (run(2, 5),), "advice"),
        ("make `blur` cheaper", run(0, 5), (run(2, 9),), "advice"),  # no setting of the loader's
    ],
)
def test_what_was_tried_and_took_as_long_is_not_advised_again(
    change: str, now: LoaderRun, before: tuple[LoaderRun, ...], severity: str
) -> None:
    (found,) = without_tried([advice(change)], now, before)
    assert found.severity == severity
    assert bool(found.change) is (severity == "advice")


@pytest.mark.parametrize(
    ("now", "before", "severity"),
    [
        (run(2, 6.9), run(0, 4.6, TWO), "advice"),  # longer
        (run(2, 4.7), run(0, 4.6, TWO), "note"),  # neither shorter nor much longer
        (run(2, 3.0), run(0, 4.6, TWO), ""),  # it helped
        (run(2, 6.9), run(0, 4.6), ""),  # nobody had advised it
        (run(4, 6.9), run(0, 4.6, TWO), ""),  # another number than was advised
        (run(0, 9), run(2, 4.6, NONE), "advice"),
        (run(2, 5, persistent=True), run(2, 4.8, PERSISTENT), "note"),
    ],
)
def test_advice_that_was_followed_in_vain_is_said_and_not_followed_by_more(
    now: LoaderRun, before: LoaderRun, severity: str
) -> None:
    more = advice("`num_workers=8`; `--tune-workers` measures which number is best")
    found = list(without_tried([more], now, [before]))
    assert (found == [more]) is not bool(severity)
    if severity:
        (line,) = found
        assert line.severity == severity
        name, value = line.change.strip("`").partition("`")[0].split("=")
        assert str(getattr(before, name)) == value  # as it was
        assert line.total == max(0, now.epoch - before.epoch) * 3


def profiled(**settings: Any) -> FitObservations:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, **settings)
    profile = FitProfile()
    profile.start()
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    profile.finish()
    return profile.observations


def test_runs_of_the_same_fit_are_remembered_as_figures() -> None:
    assert profiled().tried == ()
    assert profiled(shuffle=True).tried[0].num_workers == 0
    observed = profiled(num_workers=1)
    assert [each.num_workers for each in observed.tried] == [0, 0]
    assert {each.fit for each in observed.tried} == {"PyTorch loop · Linear · TensorDataset · 4 · 10"}
    assert FitObservations.from_json(observed.to_json()).tried == observed.tried

    followed = replace(observed.tried[0], advised=("`num_workers=1`",), epoch=1)  # it was much shorter before
    report = FitAnalysis(replace(observed, tried=(followed,))).report
    assert report.loader is not None
    assert "`num_workers=0`, as it was" in report.loader.advice[0].change
    assert [each.change for each in report.loader.advice if "num_workers" in each.change] == ["`num_workers=0`, as it was"]


class Sleepy(Dataset[Any]):
    """Items that take a while whatever else the machine does."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(0.006)
        return torch.full((4,), float(at))


def epochs_of(data: Any, count: int = 1, **settings: Any) -> list[float]:
    """Train with a loader that is made anew for each epoch; return the seconds of the epochs."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        for x in DataLoader(data, batch_size=8, **settings):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return seconds


def advised(data: Any, epochs: int, **settings: Any) -> FitFinding:
    profile = FitProfile()
    profile.start()
    epochs_of(data, epochs, **settings)
    loader = profile.finish().loader
    assert loader is not None
    return next(finding for finding in loader.advice if "num_workers" in finding.change)


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def number_advised(finding: FitFinding) -> int:
    found = re.match(r"`num_workers=(\d+)`", finding.change)
    assert found
    return int(found[1])


@pytest.mark.skipif(usable_cores() < 2, reason="workers that share a core with the fit are not advised")
def test_an_epoch_with_the_workers_that_are_advised_takes_as_long_as_predicted() -> None:
    assert any(_is_as_predicted() for _ in range(3)), "profile and epoch are apart: other work of the machine may fall into one"


def _is_as_predicted() -> bool:
    finding = advised(Sleepy(), 1)
    workers = number_advised(finding)
    found = re.search(rf"an epoch takes (.+), with {workers} workers (.+) to (.+)", finding.evidence)
    assert found
    now, low, high = map(seconds, found.groups())
    assert low < high < now
    return low * 0.95 < min(epochs_of(Sleepy(), 2, num_workers=workers)) < high


def test_an_epoch_without_the_workers_that_are_needless_is_shorter_by_what_is_predicted() -> None:
    assert any(_is_shorter_as_predicted() for _ in range(3))


def _is_shorter_as_predicted() -> bool:
    data = torch.randn(32, 4)
    finding = advised(data, 12, num_workers=2)
    assert number_advised(finding) == 0
    found = re.search(r"batches take (.+) to make, its workers (.+) to start", finding.evidence)
    assert found
    made, start = map(seconds, found.groups())
    assert made * 2 < start
    return min(epochs_of(data, 3)) < min(epochs_of(data, 3, num_workers=2)) - (start - made) / 4
