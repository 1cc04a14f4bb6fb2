"""Fits that are disturbed, nested or profiled in turns: each ends as without a profile, and nothing stays behind."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import fetch

from nbguard import FitMonitor
from nbguard.errors import NbguardError
from nbguard.frontend.notebook.profile import profile_fit
from tests.kernels import Zygote
from tests.profiler.loops import Fails, learner, model, quiet_fit, train

Weights = list[torch.Tensor]


def weights(net: Any) -> Weights:
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def functions() -> dict[str, object]:
    """Return the functions that a profile puts marks around."""
    from fastai.learner import Learner

    return {
        "next": torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        "fetch": fetch._MapDatasetFetcher.fetch,
        "call": nn.Module.__call__,
        "Sequential": nn.Sequential.__call__,
        "backward": torch.autograd.backward,
        "zero_grad": torch.optim.Optimizer.zero_grad,
        "event": Learner._call_one,
        "to": torch.Tensor.to,
        "item": torch.Tensor.item,
    }


@pytest.fixture(autouse=True)
def everything_goes_back() -> Iterator[None]:
    """Nothing of torch's and fastai's is another function after a test than before it."""
    before = functions()
    yield
    assert functions() == before


def seeded(*cbs: Any) -> Any:
    """Return a Learner whose loaders, which draw their seed from Python's generator, shuffle as those of any other."""
    random.seed(0)
    return learner(*cbs)


class Planted:
    """Raises KeyboardInterrupt at the call of a phase in the twelfth batch."""

    def __init__(self, phase: str) -> None:
        self.phase, self.calls = phase, 0

    def at(self, phase: str) -> None:
        if phase == self.phase:
            self.calls += 1
            if self.calls == 12:
                raise KeyboardInterrupt


def interrupted_fit(planted: Planted) -> Weights:
    """Train in a loop of every phase until it is interrupted, and return the weights then."""

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 160

        def __getitem__(self, at: int) -> Any:
            if at % 8 == 0:
                planted.at("wait")
            return torch.full((6,), float(at) / 160), torch.tensor(at % 2)

    class Net(nn.Sequential):
        def forward(self, x: Any) -> Any:
            planted.at("forward")
            return super().forward(x)

    class Measure(nn.CrossEntropyLoss):
        def forward(self, *args: Any) -> Any:
            planted.at("loss")
            return super().forward(*args)

    class Steps(torch.optim.SGD):
        def step(self, *args: Any) -> Any:
            planted.at("step")
            return super().step(*args)

        def zero_grad(self, *args: Any) -> None:
            planted.at("zero_grad")
            super().zero_grad(*args)

    def hook(gradient: Any) -> Any:
        planted.at("backward")
        return gradient

    net = Net(*model())
    net[0].weight.register_hook(hook)
    optimizer, measure = Steps(net.parameters(), 0.1), Measure()

    def loop() -> None:
        for x, y in DataLoader(Rows(), batch_size=8):
            measure(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            planted.at("other")

    with pytest.raises(KeyboardInterrupt):
        loop()
    return weights(net)


@pytest.mark.parametrize("phase", ["wait", "forward", "loss", "backward", "step", "zero_grad", "other"])
def test_a_profile_after_one_that_was_interrupted_in_any_phase(phase: str) -> None:
    plain = interrupted_fit(Planted(phase))
    profile = profile_fit(show=False)
    with profile:
        profiled = interrupted_fit(Planted(phase))

    assert same(plain, profiled)

    with profile_fit(show=False) as second:
        net = train(1)
    assert same(weights(net), weights(train(1)))
    assert second.report.timing.batches == 8
    assert second.report.notes == ()


def steps(net: Any) -> Weights:
    """Train a model without any chance, and return its weights."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in DataLoader([(torch.full((6,), at / 128), at % 2) for at in range(128)], batch_size=8):
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def test_a_second_profile_in_a_thread_is_refused_and_both_fits_are_as_without() -> None:
    nets = model(), model()
    plain = steps(model())
    results: dict[str, Any] = {}

    def other() -> None:
        try:
            with profile_fit(show=False):
                results["began"] = True
        except NbguardError as error:
            results["refused"] = str(error)
        results["weights"] = steps(nets[0])

    with profile_fit(show=False) as profile:
        thread = threading.Thread(target=other)
        thread.start()
        mine = steps(nets[1])
        thread.join()

    assert "began" not in results
    assert "a profile runs already" in results["refused"]
    assert same(mine, plain)
    assert same(results["weights"], plain)
    assert profile.report.timing.batches == 16


FORKED = """
import os, torch, nbguard
from torch import nn

torch.set_num_threads(1)
with nbguard.profile_fit(show=False):
    if not (child := os.fork()):
        try:
            net = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            with nbguard.profile_fit(show=False) as profile:
                for x in torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4):
                    optimizer.zero_grad()
                    net(x).sum().backward()
                    optimizer.step()
            print("batches", profile.report.timing.batches, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_a_process_forked_inside_a_profile_has_a_profile_of_its_own(fastai_zygote: Zygote) -> None:
    """As `notebook_launcher` forks the ranks of a cell with `%%profile_fit`."""
    printed, errors = fastai_zygote.run(FORKED, {}, 300, frozen=True)

    assert printed == "batches 8\n", errors


def test_a_monitor_inside_a_profile_leaves_the_fit_to_it() -> None:
    plain = weights(quiet_fit(seeded()).model)
    monitor = FitMonitor(show=False)

    with profile_fit(show=False) as profile:
        learn = quiet_fit(seeded(), cbs=monitor)

    assert same(weights(learn.model), plain)
    assert monitor.report is None
    assert profile.report.timing.batches == 16


def test_a_profile_that_begins_inside_a_monitored_fit_is_refused() -> None:
    from fastai.callback.core import Callback

    refused: list[str] = []

    class Profiles(Callback):  # type: ignore[misc]
        def before_epoch(self) -> None:
            try:
                with profile_fit(show=False):
                    pass
            except NbguardError as error:
                refused.append(str(error))

    monitor = FitMonitor(show=False)
    learn = quiet_fit(seeded(), cbs=[monitor, Profiles()])

    assert len(refused) == 2
    assert same(weights(learn.model), weights(quiet_fit(seeded()).model))
    assert monitor.report is not None
    assert monitor.report.timing.batches == 16


@pytest.mark.parametrize("event", ["before_fit", "after_epoch", "after_cancel_fit", "after_fit"])
@pytest.mark.parametrize("monitors", [False, True])
def test_a_callback_that_raises_at_the_end_of_a_fit(event: str, monitors: bool) -> None:
    from fastai.callback.core import Callback, CancelFitException

    class Cancels(Callback):  # type: ignore[misc]
        def after_train(self) -> None:
            if event == "after_cancel_fit":
                raise CancelFitException

    def fit(around: Callable[[], Any], *more: Any) -> Weights:
        learn = seeded(Fails(event, 1), Cancels(), *more)
        with pytest.raises(ZeroDivisionError, match="planted"), around():
            quiet_fit(learn)
        return weights(learn.model)

    plain = fit(nullcontext)
    profiled = fit(nullcontext, FitMonitor(show=False)) if monitors else fit(lambda: profile_fit(show=False))

    assert same(plain, profiled)
    with profile_fit(show=False) as profile:
        train(1)
    assert profile.report.timing.batches == 8
