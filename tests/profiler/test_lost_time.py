"""Real fits in which something besides the model takes most of the time: the first sentence names it, with its cost."""

from __future__ import annotations

import gc
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fastai.basics import AvgMetric, Callback, CrossEntropyLossFlat, DataLoaders, Learner
from fastai.data.transforms import Transform

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport
from tests.profiler.loops import BATCH, items, learner, model, quiet_fit, torch_loader, train

LONG = 0.05  # seconds of each planted call: many times the step of these fits, on a busy machine too


def profiled(fit: Any, *args: Any, **kw: Any) -> FitReport:
    gc.collect()  # workers that an earlier test has left are not to be waited for in this fit
    with profile_fit(show=False) as profile:
        fit(*args, **kw)
    report = profile.report
    assert sum(row.total for row in report.timing.rows) == report.timing.wall
    return report


def seconds_of(report: FitReport, kind: str) -> float:
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    assert finding.total is not None
    return finding.total / 1e9


def test_a_batch_transform_of_fastais_loaders() -> None:  # foreign.md 05
    class Slow(Transform):  # type: ignore[misc]
        def encodes(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(LONG)
            return x

    data = items()
    dls = DataLoaders.from_dsets(data, data[:32], bs=BATCH, device="cpu", after_batch=[Slow()], num_workers=0)
    report = profiled(quiet_fit, Learner(dls, model(), loss_func=CrossEntropyLossFlat()), 1)

    assert report.first[0].startswith("the batch transform `Slow.encodes` (") or report.first[0].startswith(
        "the batch transform `Slow`"
    )
    assert seconds_of(report, "code") >= 11 * LONG


def test_a_slow_metric() -> None:  # foreign.md 06
    def slow(_predictions: Any, _targets: Any) -> float:
        time.sleep(4 * LONG)
        return 0.5

    learn = learner()
    learn.metrics = [AvgMetric(slow)]
    report = profiled(quiet_fit, learn, 2)

    assert report.first[0].startswith("the metric `slow` (test_lost_time.py:")
    assert seconds_of(report, "code") >= 7 * 4 * LONG


def test_validation_that_takes_most_of_the_fit() -> None:  # foreign.md 09, q23
    net = model()

    class SlowInEval(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                time.sleep(LONG)
            return self.inner(x)

    optimizer, slow = torch.optim.SGD(net.parameters(), 1e-2), SlowInEval()

    def fit() -> None:
        for _ in range(2):
            for x, y in torch_loader():
                torch.nn.functional.cross_entropy(slow(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for x, _y in torch_loader():
                    slow(x)

    report = profiled(fit)

    assert report.first[0].startswith("validation takes ")
    assert "validate less often" in report.first[0]


def test_a_callback_before_validation_and_one_that_saves_after_each_epoch(tmp_path: Path) -> None:  # foreign.md q08, 07
    class Before(Callback):  # type: ignore[misc]
        def before_validate(self) -> None:
            time.sleep(10 * LONG)

    class Saves(Callback):  # type: ignore[misc]
        def after_epoch(self) -> None:
            torch.save(self.learn.model.state_dict(), tmp_path / "model.pth")
            time.sleep(20 * LONG)

    report = profiled(quiet_fit, learner(Before(), Saves()), 2)

    assert report.first[0].startswith("the callback `Saves` takes ")
    assert any("`Before`" in sentence for sentence in report.first)


@pytest.mark.parametrize("imports", [False, True])
def test_code_that_most_of_a_short_fit_goes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: bool) -> None:
    """An import at its beginning has no part in it, and leaves enough looks at the stack for the rest."""
    (tmp_path / "takes_a_second.py").write_text("import time\nfor _ in range(100): time.sleep(0.01)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.003)
        return torch.randn(BATCH, 6), torch.randint(2, (BATCH,))

    def fit() -> None:
        if imports:
            importlib.import_module("takes_a_second")
        train(1, loader=(drawn() for _ in range(50)))

    train(1)
    report = profiled(fit)
    sys.modules.pop("takes_a_second", None)

    assert report.first[0].startswith("`drawn` (test_lost_time.py:")
    assert seconds_of(report, "code") >= 0.1


def test_a_few_batches_that_stall() -> None:  # foreign.md 33
    count = 0

    def stalls(_: Any) -> None:
        nonlocal count
        count += 1
        if count in (20, 31, 44, 60):
            time.sleep(20 * LONG)

    report = profiled(train, 1, loader=torch_loader(count=8 * 80), each=stalls)

    assert " batches stall in `stalls` (test_lost_time.py:" in report.first[0]
    assert "do it outside of the loop" in report.first[0]
    (finding,) = [finding for finding in report.findings if finding.kind == "stall"]
    assert "training batches 20, 31, " in finding.evidence


def test_one_batch_that_computes_for_long() -> None:
    sizes = [200_000 if number == 31 else BATCH for number in range(1, 81)]
    batches = [torch.ones(1, 64).expand(size, 64) for size in sizes]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)

    def fit() -> None:
        for x in loader:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = profiled(fit)

    assert report.first[0].startswith("training batch 31 takes ")
    assert "it computed all that time" in report.first[0]


def test_starting_many_workers_for_few_items() -> None:  # foreign.md 03
    with pytest.warns(UserWarning, match="worker"):
        report = profiled(train, 1, loader=torch_loader(workers=8))

    assert "worker" in report.first[0]


def test_a_healthy_fit_says_where_its_time_is() -> None:
    report = profiled(quiet_fit, learner(count=240), 2)

    assert report.first[0].startswith("nothing stands out: ") or "bound" in report.first[0]
    assert all(finding.total is None for finding in report.findings)
