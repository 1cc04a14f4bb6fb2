"""Loops that ask no loader: their batches are told apart, and later on few of them are looked at, as of other fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import divide
from nbguard.training.profiler.record.log import SampleSchedule
from nbguard.training.profiler.record.recorder import Event, Recorder
from tests.profiler.loops import BATCH, drawn, model, torch_loader, train
from tests.profiler.recording import recording
from tests.profiler.test_look_schedule import looked_at
from tests.profiler.test_steady_state import BytecodeCounter

MANY = 130


class Heard:
    """Notes, of each event, the losses that there were before; a subscriber as instruments are."""

    def __init__(self, *events: Event) -> None:
        self._events = events
        self.at: dict[str, list[int]] = {event: [] for event in events}
        self.batches: list[int] = []

    def start(self, recorder: Recorder) -> None:
        self._recorder = recorder
        for event in self._events:
            recorder.subscribe(event, self._noting(event))
        recorder.subscribe("batch", self.batches.append)

    def stop(self) -> None: ...

    def _noting(self, event: str) -> Callable[..., None]:
        return lambda *_: self.at[event].append(self._recorder.losses)


def test_few_batches_are_looked_at_and_each_as_a_whole() -> None:
    heard = Heard("forward", "loss", "backward", "step", "zero_grad")
    with recording(heard):
        train(1, loader=drawn(MANY))

    chosen = looked_at(SampleSchedule(), 1, MANY)
    assert heard.batches == [number for number in range(2, MANY + 1) if number in chosen or number - 1 in chosen]
    assert heard.at["forward"] == [number - 1 for number in chosen]
    assert heard.at["loss"] == heard.at["backward"] == heard.at["step"] == heard.at["zero_grad"] == chosen


def test_a_batch_takes_few_bytecodes() -> None:
    counter = BytecodeCounter()
    with profile_fit(show=False):
        train(1, loader=drawn(60), each=counter.batch)

    assert 300 < counter.of_a_batch < 725


def test_a_loop_without_a_model_is_looked_at_as_rarely() -> None:
    def fit() -> None:
        weights = torch.randn(6, 2, requires_grad=True)
        for x, y in drawn(MANY):
            nn.functional.cross_entropy(x @ weights, y).backward()
            with torch.no_grad():
                weights -= 0.1 * weights.grad
            weights.grad = None

    heard = Heard("backward")
    with recording(heard):
        fit()

    assert heard.at["backward"] == looked_at(SampleSchedule(), 1, MANY)


def test_losses_that_are_added_up_for_a_step_are_of_one_batch() -> None:
    heard = Heard("forward", "step")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with recording(heard) as recorder:
        for _ in range(60):
            for x, y in drawn(4):
                (nn.functional.cross_entropy(net(x), y) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        log = recorder.stop()

    assert len(divide(log).batches) == 60
    first = 3  # those of the first step are batches of their own: no step was seen yet
    steps = [4 * number for number in (*range(1, 33 - first), 39 - first, 52 - first)]
    assert heard.at["step"] == steps
    assert heard.at["forward"] == [at - left for at in steps for left in (4, 3, 2, 1)]


@pytest.mark.parametrize("data", [[*drawn(40)], torch_loader(count=40 * BATCH)], ids=["drawn", "of a loader"])
def test_optimizers_that_step_one_after_another_for_one_loss_make_one_batch(data: Any) -> None:
    """As where matrices are trained by one (Muon) and the rest by another."""
    net = model()
    optimizers = [torch.optim.SGD(layer.parameters(), 0.01) for layer in (net[0], net[-1])]
    with profile_fit(show=False) as profile:
        for x, y in data:
            nn.functional.cross_entropy(net(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()

    timing = profile.report.timing
    assert timing.batches == 40
    assert sum(row.total for row in timing.rows) == timing.wall
    log = profile.observations.log
    batches = divide(log, [end - 1 for end in log.times])
    steps = [moment.batch for moment in batches.moments if moment.phase == phase_log.STEP]
    assert len(steps) >= 80
    assert set(steps) == {batch.start for batch in batches.batches}


def test_an_optimizer_that_is_used_no_more_is_not_waited_for() -> None:
    heard = Heard("loss")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with recording(heard):
        for number, (x, y) in enumerate(drawn(700)):
            nn.functional.cross_entropy(net(x), y).backward()
            if number < 40:
                optimizer.step()

    assert any(at > 400 for at in heard.at["loss"])
    assert len(heard.at["loss"]) < 400


def test_many_losses_of_one_batch_of_a_loader_are_looked_at_more_rarely() -> None:
    """As of a long sequence that is trained on in pieces."""
    heard = Heard("loss")
    net = model()
    with recording(heard) as recorder:
        for x, y in torch_loader(count=BATCH):
            for _ in range(MANY):
                nn.functional.cross_entropy(net(x), y).backward()

    assert heard.at["loss"][:33] == [*range(1, 34)]
    assert len(heard.at["loss"]) < 33 + 40
    assert recorder.losses == MANY


def test_a_model_that_runs_again_in_the_backward_pass_begins_no_batch() -> None:
    heard = Heard("backward")
    net = model()
    with recording(heard):
        for x, y in drawn(40):
            nn.functional.cross_entropy(checkpoint(net, x, use_reentrant=False), y).backward()

    assert heard.batches == [*range(2, 34), 39, 40]
    assert heard.at["backward"] == [*range(1, 33), 39]


def test_batches_of_a_loader_that_follow_are_counted_on() -> None:
    heard = Heard("loss")
    net, measure = model(), nn.CrossEntropyLoss()
    with recording(heard) as recorder:
        train(1, loader=drawn(40))
        for x, y in torch_loader():
            measure(net(x), y).backward()
        log = recorder.stop()

    batches = divide(log).batches
    assert [batch.loop for batch in batches] == [*([0] * 40), *([1] * 8)]
    assert all(batch.has_loss for batch in batches)
    assert [number for number in heard.at["loss"] if number > 40] == [41, 42, 43]  # the first ones of each pass


@pytest.mark.parametrize("batches", [5, 60])
def test_the_table_adds_up(batches: int) -> None:
    with profile_fit(show=False) as profile:
        train(1, loader=drawn(batches))

    timing = profile.report.timing
    assert sum(row.total for row in timing.rows) == timing.wall
    assert len(divide(profile.observations.log).batches) == batches
    labels = [profile.observations.log.labels[code] for code in profile.observations.log.codes]
    assert labels.count(phase_log.BACKWARD) == labels.count(phase_log.FORWARD) == batches
