"""Fits with planted faults: each is found, named, and as large as it was planted. Healthy fits get no finding."""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import pytest
import torch
from fastai.basics import Callback, CrossEntropyLossFlat, DataLoaders, Learner, nn

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitFinding, FitReport, MemoryReport
from nbguard.training.profiler.instruments import growth_watch as growth

BATCH = 4
WIDTH = 256
TOOK: list[float] = []


class Items(torch.utils.data.Dataset[Any]):
    """Items made by a transform that takes 5 ms."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, at: int) -> tuple[Any, Any]:
        return slow_transform(torch.full((WIDTH,), at / self.count)), torch.tensor(at % 2)

    def __len__(self) -> int:
        return self.count


def slow_transform(x: Any) -> Any:
    begun = time.perf_counter()
    time.sleep(0.005)
    TOOK.append(time.perf_counter() - begun)  # on a busy machine it sleeps longer
    return x


class Sleeps(Callback):
    """Sleeps 3 ms after each step, and notes how long that took."""

    def __init__(self) -> None:
        self.took: list[float] = []

    def after_step(self) -> None:
        begun = time.perf_counter()
        time.sleep(0.003)
        self.took.append(time.perf_counter() - begun)


class Keeps(Callback):
    """Keeps every loss with its graph, and reads each."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.read: list[float] = []

    def after_loss(self) -> None:
        if self.training:
            self.losses.append(self.learn.loss_grad)
            self.read.append(self.learn.loss_grad.item())


def finding(report: FitReport, kind: str) -> FitFinding:
    """Return the one finding of a kind, of all that the report has."""
    everything = (*report.findings, *(report.loader.advice if report.loader else ()))
    found = [each for each in everything if each.kind == kind]
    assert len(found) == 1, report.mimebundle()["text/plain"]
    return found[0]


def words(found: FitFinding) -> str:
    return f"{found.what}; {found.evidence}; {found.change}"


@pytest.fixture(scope="module")
def planted() -> tuple[FitReport, Sleeps, Keeps]:
    sleeps, keeps = Sleeps(), Keeps()
    loader = torch.utils.data.DataLoader(Items(160), batch_size=BATCH, num_workers=0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    learn = Learner(DataLoaders(loader, loader), net, loss_func=CrossEntropyLossFlat(), cbs=[sleeps, keeps])
    learn.remove_cbs([each for each in learn.cbs if each.name == "progress"])
    learn._do_epoch_validate = lambda *_: None
    with pytest.MonkeyPatch.context() as patched, profile_fit(show=False) as profile, learn.no_logging():
        patched.setattr(growth, "_TOO_SLOW", float("inf"))  # on a busy machine a look at pytest's heap takes seconds
        learn.fit(2, 1e-3)
    return profile.report, sleeps, keeps


def test_a_slow_transform(planted: tuple[FitReport, Sleeps, Keeps]) -> None:
    found = finding(planted[0], "transform")

    assert "slow_transform" in words(found)
    batches = [sum(TOOK[at : at + BATCH]) for at in range(0, len(TOOK), BATCH)]  # one long sleep makes its batch longer
    assert found.time == pytest.approx(statistics.median(batches) * 1e9, rel=0.2)
    assert planted[0].loader is not None
    assert planted[0].loader.bound == "data"
    assert "slow_transform" in " ".join(planted[0].first)


def test_a_slow_callback(planted: tuple[FitReport, Sleeps, Keeps]) -> None:
    found = finding(planted[0], "callback")

    assert "`Sleeps`" in found.what
    assert found.time == pytest.approx(statistics.median(planted[1].took) * 1e9, rel=0.2)


def test_a_value_read_in_each_batch(planted: tuple[FitReport, Sleeps, Keeps]) -> None:
    everything = [each for each in planted[0].findings if each.kind == "sync"]
    (found,) = (each for each in everything if "Keeps" in words(each) or "test_planted.py" in words(each))

    assert "1 " in found.evidence


def test_graphs_that_are_kept(planted: tuple[FitReport, Sleeps, Keeps]) -> None:
    found = finding(planted[0], "graph")

    assert "losses" in words(found)
    # a kept graph keeps the hidden layer's output (its ReLU's) and the input of each batch, and small change
    assert found.nbytes == pytest.approx(2 * BATCH * WIDTH * 4 + 3000, rel=0.5)
    assert isinstance(planted[0].memory, MemoryReport)


def test_more_workers_than_cores() -> None:
    many = 4 * len(os.sched_getaffinity(0))
    loader = torch.utils.data.DataLoader([(torch.ones(4), torch.tensor(0))] * 160, batch_size=BATCH, num_workers=many)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    with profile_fit(show=False) as profile:
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = profile.report
    said = (*report.findings, *(report.loader.advice if report.loader else ()))
    of_workers = [each for each in said if each.kind in ("workers", "needless workers")]  # by how long they take to start here
    assert len(of_workers) == 1
    assert of_workers[0].what.startswith(f"{many} workers ")


class Bursts(nn.Module):
    """Gives infinity in its tenth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * float("inf") if self.calls == 10 else x


def small_fit(net: Any, optimizer: Any, dtype: torch.dtype = torch.float) -> FitReport:
    with profile_fit(show=False) as profile:
        for _ in range(20):
            net(torch.ones(4, 8, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile.report


def test_infinity_from_a_layer() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Bursts(), nn.Linear(8, 2))

    found = finding(small_fit(net, torch.optim.SGD(net.parameters(), lr=1e-3)), "nan")

    assert found.severity == "problem"
    assert "`1` (Bursts)" in found.evidence
    assert "backward pass 10" in found.what


def test_an_eps_that_rounds_to_zero() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).half()

    found = finding(small_fit(net, torch.optim.Adam(net.parameters(), lr=1e-6, eps=1e-8), torch.half), "eps")

    assert found.severity == "problem"
    assert "1e-08" in words(found)


def test_graphs_too_small_to_be_seen_by_their_bytes() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    main = sys.modules["__main__"].__dict__
    main["planted_losses"] = losses
    try:
        with profile_fit(show=False) as profile:
            for _ in range(20):
                loss = net(torch.ones(2, 4)).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
    finally:
        del main["planted_losses"]

    assert finding(profile.report, "graph").what == "`planted_losses` keeps 20 autograd graphs"
