"""What is ours in a batch of the steady state: few bytecodes, and patches only where the loop itself calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import fastai.learner
import pytest
import torch
from fastai.basics import Callback
from torch import nn
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.analysis.time import phase_log
from tests.profiler.loops import BATCH, learner, model, quiet_fit, torch_loader, train

BATCHES = 60
FIRST, LAST = 41, 51
"""Batches whose bytecodes are counted: none of them is looked at."""


class BytecodeCounter:
    """Counts the bytecodes of nbguard that run on this thread while batches pass."""

    def __init__(self) -> None:
        self.batches = self.bytecodes = 0

    def batch(self, *_: Any) -> None:
        """Note that a batch has begun."""
        self.batches += 1
        if self.batches in (FIRST, LAST):
            sys.settrace(self._called if self.batches == FIRST else None)

    @property
    def of_a_batch(self) -> float:
        """Return the bytecodes of one batch."""
        return self.bytecodes / (LAST - FIRST)

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if "/nbguard/training/profiler/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        self.bytecodes += event == "opcode"
        return self._count


def plain_loop(each: Callable[..., None]) -> None:
    train(1, loader=torch_loader(count=BATCH * BATCHES), each=each)


def fastai_fit(each: Callable[..., None]) -> None:
    learn = learner(count=BATCH * BATCHES)
    measure = learn.loss_func

    def loss(*args: Any) -> Any:
        each()
        return measure(*args)

    learn.loss_func = loss
    quiet_fit(learn, 1)


@pytest.mark.parametrize(("fit", "most"), [(plain_loop, 805), (fastai_fit, 1095)], ids=["plain loop", "fastai"])
def test_a_batch_takes_few_bytecodes(fit: Callable[[Callable[..., None]], None], most: int) -> None:
    """On a machine that is busy, too: they are counted. It was 1,128 and 1,789, then 740 and 1,344, then 684 and 986.

    Some 20 are for a model's result, which is shown to checks in batches that are looked at.
    Some 80 are for one gradient that each step on the CPU reads, so that a NaN in it is found in its own batch.
    """
    counter, before = BytecodeCounter(), sys.gettrace()
    try:
        with profile_fit(show=False):
            fit(counter.batch)
    finally:
        sys.settrace(before)

    assert 300 < counter.of_a_batch < most


class Inner(nn.Linear):
    """A layer of a class that the loop itself does not call."""


class Later(nn.Sequential):
    """A model of a class that the loop calls only in a later pass over the loader."""


def watched(cls: type) -> bool:
    return getattr(cls.__call__, "__wrapped__", None) is not None


def test_only_models_and_losses_are_watched_where_few_batches_are_looked_at() -> None:
    net = nn.Sequential(Inner(6, 16), nn.ReLU(), Inner(16, 2))
    seen: list[tuple[bool, ...]] = []

    def each(_: Any) -> None:
        fetches = hasattr(_MapDatasetFetcher.fetch, "__wrapped__")
        seen.append((watched(nn.Sequential), watched(nn.CrossEntropyLoss), watched(Inner), fetches))

    with profile_fit(show=False) as profile:
        loop(net, each, BATCHES)

    assert seen[0] == (True, True, True, True)
    assert seen[-1] == (True, True, False, False)
    assert not hasattr(_MapDatasetFetcher.fetch, "__wrapped__")
    assert not any(map(watched, (nn.Sequential, nn.CrossEntropyLoss, Inner)))
    assert "__call__" not in vars(nn.Sequential)
    assert calls(profile.report, phase_log.FORWARD) == calls(profile.report, phase_log.BACKWARD)


def test_a_model_of_another_class_that_is_called_later_is_seen() -> None:
    def fit() -> None:
        loop(model(), lambda _: None, BATCHES)
        other = Later(*model())
        with torch.no_grad():
            for x, _y in torch_loader(count=BATCH * BATCHES):
                other(x)

    with profile_fit(show=False) as profile:
        fit()

    labels = [profile.observations.log.labels[code] for code in profile.observations.log.codes]
    assert labels.count(phase_log.FORWARD) == 2 * BATCHES


def test_a_class_that_cannot_be_changed_leaves_all_modules_watched() -> None:
    class Fixed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError("planted")

    class Net(nn.Sequential, metaclass=Fixed):
        pass

    with profile_fit(show=False) as profile:
        loop(Net(*model()), lambda _: None, BATCHES)

    assert profile.report.notes == ()
    assert calls(profile.report, phase_log.FORWARD) == calls(profile.report, phase_log.BACKWARD)


def is_marked(owner: Any, name: str) -> bool:
    return hasattr(vars(owner).get(name), "__wrapped__")


class Copies(Callback):
    """Notes, batch by batch, which ways to copy a tensor are marked."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def after_pred(self) -> None:
        self.seen.append((is_marked(torch.Tensor, "to"), is_marked(fastai.learner, "to_device")))


def test_copies_in_a_learners_fit_are_marked_where_fastai_makes_them() -> None:
    copies = Copies()

    with profile_fit(show=False) as profile:
        quiet_fit(learner(copies, count=BATCH * BATCHES), 1)
        assert is_marked(torch.Tensor, "to")  # a plain loop may follow
        assert is_marked(fastai.learner, "to_device")

    assert copies.seen[0] == (True, True)
    assert copies.seen[BATCHES - 1] == (False, False)  # the loader has put the batch where the model is
    assert calls(profile.report, phase_log.TO_DEVICE)
    assert not is_marked(torch.Tensor, "to")
    assert not is_marked(fastai.learner, "to_device")


def test_a_learner_that_copies_its_batches_itself_is_timed_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the model is on another device than its loaders."""
    before, copies = fastai.learner.to_device, Copies()

    def copied(batch: Any, *args: Any) -> Any:
        return tuple(each.clone() for each in before(batch, *args))

    monkeypatch.setattr(fastai.learner, "to_device", copied)

    with profile_fit(show=False) as profile:
        quiet_fit(learner(copies, count=BATCH * BATCHES), 1)

    assert copies.seen[BATCHES - 1] == (False, True)
    assert fastai.learner.to_device is copied
    log = profile.observations.log
    marks = [log.labels[code] for code in log.codes]
    assert marks.count(phase_log.TO_DEVICE) >= 2 * BATCHES  # the loader's and the Learner's


@pytest.mark.parametrize("to", [torch.float32, torch.float64])
def test_copies_of_a_plain_loop_are_marked_in_all_batches_if_it_makes_any(to: torch.dtype) -> None:
    marked = []

    def each(loss: Any) -> None:
        loss.to(to)
        marked.append(is_marked(torch.Tensor, "to"))

    with profile_fit(show=False) as profile:
        loop(model(), each, BATCHES)
        assert is_marked(torch.Tensor, "to")  # another loop may follow

    assert marked[0]
    assert marked[BATCHES - 1] == (to is torch.float64)
    log = profile.observations.log
    marks = [log.labels[code] for code in log.codes].count(phase_log.TO_DEVICE)
    assert marks == BATCHES if to is torch.float64 else marks < BATCHES
    assert not is_marked(torch.Tensor, "to")


def test_compiled_code_is_compiled_once_also_where_the_patches_change() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    net = model()
    net[0] = torch.compile(net[0], backend=counter)

    with profile_fit(show=False):
        loop(net, lambda _: None, BATCHES)

    assert counter.frame_count == 1


def loop(net: Any, each: Callable[[Any], None], batches: int) -> None:
    """Train a model for so many batches."""
    optimizer, measure = torch.optim.SGD(net.parameters(), 0.01), nn.CrossEntropyLoss()
    for x, y in torch_loader(count=BATCH * batches):
        loss = measure(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        each(loss)


def calls(report: FitReport, phase: str) -> bool:
    """Say whether a phase has a row."""
    return any(row.phase == phase and row.total for row in report.timing.rows)
